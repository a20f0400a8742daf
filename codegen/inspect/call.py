"""One call of a variant, with everything that its mask depends on: lengths, offset, head, scalars and tensors.

Arguments that are not given get example values. A packed call is represented by one call per sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from codegen.analysis.affine import MOST_POSITION
from codegen.analysis.call_modes import POSITIONAL, has_tokens, packed_dims
from codegen.analysis.intervals import LARGEST
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import LENGTH_NAMES, ScalarType, TensorSpec, Type
from codegen.spec import dims
from codegen.spec.model import ScalarSpec, Variant
from codegen.util.errors import CodegenError, did_you_mean

EXAMPLE_HEADS = 8
"""Number of query and of key heads if no given tensor has such a dim."""

SEGMENTS = 4
"""Runs of equal values in an example of integers."""

_NPY = b"\x93NUMPY"
"""The first bytes of a .npy file."""

_KINDS = {"bool": "b", "float": "f", "int": "iu"}
"""Kind of a declared dtype -> the kinds of numpy dtypes that its file may have."""


class ScalarError(CodegenError):
    """A value that a scalar's declaration refuses: `message` says why, and the text also names the option `--set`."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        self.message = message
        super().__init__(f"--set {name}: {message}")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One head of a call. Query rows are at the positions from `q_offset` on, keys at those from 0 on. `given` are the
    names of the tensors whose values were read from files."""

    q_len: int
    kv_len: int
    q_offset: int
    b: int
    h: int
    hkv: int
    scalars: Mapping[str, int | float]
    tensors: Mapping[str, Array]
    given: Collection[str] = ()

    @property
    def uniform(self) -> dict[str, int | float]:
        """The variables with one value for all pairs."""
        lengths = {"q_len": self.q_len, "kv_len": self.kv_len}
        return {"b": self.b, "h": self.h, "hkv": self.hkv, **lengths, **self.scalars}


def make_call(
    variant: Variant,
    *,
    q_len: int,
    kv_len: int,
    q_offset: int,
    batch: int,
    head: int,
    scalars: Mapping[str, str],
    files: Mapping[str, Path],
) -> Call:
    """The call with `scalars`, given as text, and the tensors in `files`; arguments that are not given are examples.

    Raises `CodegenError` for a name the variant does not have, and for a tensor that does not fit its declaration, and
    `ScalarError` for such a scalar.
    """
    _check_known("scalar", scalars, variant.scalars)
    _check_known("tensor", files, variant.tensors)
    given = {name: _read(variant.tensors[name], path) for name, path in files.items()}
    # Queries and keys may read the same tensor, so that an example reaches as far as either.
    positions = max(q_len + q_offset, kv_len)
    least = {"q_idx": q_len + q_offset, "kv_idx": kv_len}
    sizes = _sizes([(variant.tensors[name], tensor) for name, tensor in given.items()], least, {})
    heads, kv_heads = _heads(sizes, head)
    batches = sizes.get("b", batch + 1)
    _check_index("--batch", batch, batches)
    numbers = {name: _scalar(spec, scalars.get(name), kv_len) for name, spec in variant.scalars.items()}
    sizes |= {"b": batches, "h": heads, "hkv": kv_heads, "q_idx": positions, "kv_idx": positions}
    sizes |= {"q_len": q_len, "kv_len": kv_len, **_integers(numbers)}
    return Call(
        q_len=q_len,
        kv_len=kv_len,
        q_offset=q_offset,
        b=batch,
        h=head,
        hkv=head // (heads // kv_heads),
        scalars=numbers,
        tensors={name: given.get(name, example_tensor(spec, sizes)) for name, spec in variant.tensors.items()},
        given=given.keys(),
    )


def make_packed_calls(
    variant: Variant,
    *,
    lengths: Sequence[int],
    q_offset: int,
    head: int,
    scalars: Mapping[str, str],
    files: Mapping[str, Path],
) -> list[Call]:
    """The sequences of a packed call as separate calls; `b` of each is the number of its sequence. Empty sequences are
    left out.

    Tensors in `files` are those of the packed call: they have the dims of `packed_dims`, and a position dim is as long
    as all sequences together. Examples are made for each sequence. Raises `CodegenError` as `make_call` does.
    """
    _check_known("scalar", scalars, variant.scalars)
    _check_known("tensor", files, variant.tensors)
    packed = {name: replace(spec, dims=packed_dims(spec.dims)) for name, spec in variant.tensors.items()}
    given = {name: _read(packed[name], path) for name, path in files.items()}
    total, longest = sum(lengths), max(lengths)
    fixed = {"b": len(lengths), **dict.fromkeys(POSITIONAL, total)}
    sizes = _sizes([(packed[name], tensor) for name, tensor in given.items()], {}, fixed)
    heads, kv_heads = _heads(sizes, head)
    # A free size that no tensor gives is the same for all sequences.
    free = {dim: longest for spec in packed.values() for dim in spec.dims if isinstance(dim, str)}
    sizes = free | sizes | {"h": heads, "hkv": kv_heads}
    numbers = {name: _scalar(spec, scalars.get(name), longest) for name, spec in variant.scalars.items()}
    calls = []
    for b, (first, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        if first == end:
            continue
        own_sizes = sizes | dict.fromkeys((*POSITIONAL, *LENGTH_NAMES), end - first) | _integers(numbers)
        tensors = {
            name: _part(spec, given[name], first, end, len(lengths))
            if name in given
            else example_tensor(spec, own_sizes)
            for name, spec in variant.tensors.items()
        }
        calls.append(
            Call(
                q_len=end - first,
                kv_len=end - first,
                q_offset=q_offset,
                b=b,
                h=head,
                hkv=head // (heads // kv_heads),
                scalars=numbers,
                tensors={name: _by_position(variant.tensors[name], x, q_offset) for name, x in tensors.items()},
                given=given.keys(),
            )
        )
    return calls


def _part(spec: TensorSpec, tensor: Array, first: int, end: int, sequences: int) -> Array:
    """The slice of a packed tensor that belongs to the sequence at `[first, end)`."""
    if not has_tokens(spec.dims):
        return tensor
    cuts = {"b": np.newaxis, **dict.fromkeys(POSITIONAL, slice(first, end))}
    part = tensor[tuple(cuts.get(str(dim), slice(None)) for dim in spec.dims)]
    shape = (sequences if dim == "b" else size for dim, size in zip(spec.dims, part.shape, strict=True))
    return np.broadcast_to(part, tuple(shape))


def _by_position(spec: TensorSpec, tensor: Array, q_offset: int) -> Array:
    """The tensor of a sequence in the layout of a dense call: along `q_idx` one element per position, not per row."""
    if q_offset:
        for axis, dim in enumerate(spec.dims):
            if dim == "q_idx":
                rows = tensor.shape[axis]
                positions = np.arange(max(rows + q_offset, 1))
                tensor = tensor.take(np.clip(positions - q_offset, 0, rows - 1), axis)
    return tensor


def assumed_values(spec: TensorSpec) -> str:
    """What `example_tensor` fills a tensor without an example with, in words."""
    if not spec.dims or spec.element is Type.FLOAT:
        return "0"
    steps = "position" if any(dim in POSITIONAL for dim in spec.dims) else "last index"
    return f"true at every 16th {steps}" if spec.element is Type.BOOL else f"0 to {SEGMENTS}, rising with its {steps}"


def example_tensor(spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    """The example of a tensor's spec. Without one, integers count segments along the positions, every 16th flag is set,
    and floats are 0.

    `sizes` has the sizes of the call by dim; a free dim without an entry has the size of `q_idx`.
    """
    shape = tuple(dims.size_of(dim, spec, sizes, sizes["q_idx"]) for dim in spec.dims)
    axes = [np.arange(size).reshape(-1, *(1,) * (len(shape) - 1 - axis)) for axis, size in enumerate(shape)]
    if spec.example is not None:
        indices = {str(dim): axis for dim, axis in zip(spec.dims, axes, strict=True)}
        indices |= {f"i{n}": axis for n, axis in enumerate(axes)}
        return np.broadcast_to(evaluate(spec.example, indices, {}), shape)
    if not shape or spec.element is Type.FLOAT:
        return np.zeros(shape)
    along = next((axis for axis, dim in enumerate(spec.dims) if dim in POSITIONAL), len(shape) - 1)
    segments = axes[along] // max(1, shape[along] // SEGMENTS)
    return np.broadcast_to(axes[along] % 16 == 0 if spec.element is Type.BOOL else segments, shape)


def _heads(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    """Numbers of query and key heads of the call; `head` is a query head."""
    heads = sizes.get("h", sizes.get("hkv", max(EXAMPLE_HEADS, head + 1)))
    kv_heads = sizes.get("hkv", heads)
    if heads % kv_heads:
        raise CodegenError(f"query heads must be a multiple of key heads, got tensors for {heads} and {kv_heads}")
    _check_index("--head", head, heads)
    return heads, kv_heads


def _check_index(option: str, index: int, size: int) -> None:
    if index >= size:
        raise CodegenError(f"{option} must be below {size}, the size of the given tensors, got {index}")


def _check_known(kind: str, given: Mapping[str, object], declared: Mapping[str, object]) -> None:
    for name in given:
        if name not in declared:
            listed = f"; it has {', '.join(declared)}" if declared else "; it has none"
            raise CodegenError(f"the variant has no {kind} '{name}'{did_you_mean(name, declared) or listed}")


def _integers(numbers: Mapping[str, int | float]) -> dict[str, int]:
    """The scalars that dims may be computed from."""
    return {name: number for name, number in numbers.items() if isinstance(number, int)}


def _scalar(spec: ScalarSpec, text: str | None, kv_len: int) -> int | float:
    if text is None:
        return spec.typical(kv_len)
    try:
        value = int(text) if spec.type is ScalarType.INT else float(text)
    except ValueError:
        raise ScalarError(spec.name, f"expected {spec.type.value}, got {text!r}") from None
    most = MOST_POSITION if spec.type is ScalarType.INT else LARGEST
    # Written so that a NaN is refused by any.
    if not abs(value) <= most:
        expected = "between -2**30 and 2**30" if spec.type is ScalarType.INT else "that float32 holds"
        raise ScalarError(spec.name, f"expected a number {expected}, got {text}")
    if spec.minimum is not None and not value >= spec.minimum:
        raise ScalarError(spec.name, f"expected at least {spec.minimum}, got {text}")
    if spec.maximum is not None and not value <= spec.maximum:
        raise ScalarError(spec.name, f"expected at most {spec.maximum}, got {text}")
    return value


def _read(spec: TensorSpec, path: Path) -> Array:
    """Read a `.npy` file and check its kind of number and its rank."""
    where = f"--tensor {spec.name}: {path}"
    with path.open("rb") as file:
        if file.read(len(_NPY)) != _NPY:
            raise CodegenError(f"{where}: expected a .npy file, as numpy.save writes it")
    try:
        tensor: Array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise CodegenError(f"{where}: {error}") from None
    # numpy has no bfloat16, and makes int64 and float64 of numbers without a dtype: only the kind must agree.
    kind = next(kind for kind in _KINDS if kind in spec.dtype)
    if tensor.dtype.kind not in _KINDS[kind]:
        raise CodegenError(f"{where}: expected dtype {spec.dtype} or another {kind}, got {tensor.dtype}")
    if tensor.ndim != len(spec.dims):
        raise CodegenError(f"{where}: expected shape {_dims(spec)}, got {list(tensor.shape)}")
    return tensor


def _sizes(given: list[tuple[TensorSpec, Array]], least: Mapping[str, int], fixed: Mapping[str, int]) -> dict[str, int]:
    """The size of each dim, from the shapes of the given tensors and from `fixed`, which must agree.

    Dims in `least` are left out: a tensor may be longer there than the least size.
    """
    sizes = dict(fixed)
    for spec, tensor in given:
        for dim, size in zip(spec.dims, tensor.shape, strict=True):
            if isinstance(dim, int):
                fits, rule = size == dim, ""
            elif dim in least:
                fits, rule = size >= least[dim], f" with {dim} of at least {least[dim]}"
            else:
                wanted = sizes.setdefault(dim, max(size, 1))
                fits, rule = size == wanted, f" with {dim} of {wanted}"
            if not fits or not size:
                got = list(tensor.shape)
                raise CodegenError(f"--tensor {spec.name}: expected shape {_dims(spec)}{rule}, got {got}")
    return sizes


def _dims(spec: TensorSpec) -> str:
    return f"[{', '.join(str(dim) for dim in spec.dims)}]"
