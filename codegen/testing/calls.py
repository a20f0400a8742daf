"""Calls of generated torch ops: arguments drawn from the manifest, results and gradients, their errors.

A variant's golden is its own reference, `<package>.<variant>.torch_reference`, in float64.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from codegen import PACKAGE
from codegen.ir.expr import ScalarType, TensorSpec
from codegen.ir.parse import parse_example
from codegen.ir.printers import torch_printer
from codegen.spec import dims
from codegen.util.text import pair

BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a tensor, relative to its largest element.

16 bits: 4 eps. The result is rounded once (eps / 2); the probabilities, their gradients and the output that the row
sums of the backward start from are rounded too, and those errors average out over the keys. float32: 170 eps, for sums
of some hundred terms and an exp2 of scores around 10. A wrong mask, scale or sign moves the result by 1e-1 and more.
"""


SEGMENTS = 8
"""Segments of a batch row in a segmented call: as many as the package assumes in a row."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one self-attention call. `dim_v`: the head dim of values, if it is not `dim`."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dim_v: int | None = None

    @property
    def head_dim_v(self) -> int:
        """The head dim of values."""
        return self.dim if self.dim_v is None else self.dim_v

    def __str__(self) -> str:
        heads, head_dims = pair(self.heads, self.kv_heads), pair(self.dim, self.head_dim_v)
        return f"B{self.batch} H{heads} S{self.seq} D{head_dims}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call in layout "bhsd": q `[B, Hq, S, D]`, do `[B, Hq, S, Dv]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, Dv]`, dlse
    `[B, Hq, S]`, the variant's own.

    do and dlse are used as the gradients of the loss with respect to o and lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float] = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors for which gradients are computed, by name."""
        own = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        return {"q": self.q, "k": self.k, "v": self.v, **own}

    def call(self, op: Callable[..., Any], **options: Any) -> Any:
        """Call `op` with these arguments."""
        return op(self.q, self.k, self.v, **self.tensors, **self.scalars, **options)

    def double(self) -> Inputs:
        """The same values in float64, as separate leaves."""
        q, k, v, do, dlse = (_double(tensor) for tensor in (self.q, self.k, self.v, self.do, self.dlse))
        tensors = {name: _double(tensor) for name, tensor in self.tensors.items()}
        return Inputs(q=q, k=k, v=v, do=do, dlse=dlse, tensors=tensors, scalars=self.scalars)


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def load_manifest(package: str = PACKAGE) -> dict[str, dict[str, Any]]:
    """The declarations of every generated variant, by name."""
    path = Path(importlib.import_module(package).__path__[0]) / "MANIFEST.json"
    variants: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["variants"]
    return variants


def load_op(variant: str, package: str = PACKAGE) -> Callable[..., Any]:
    """`<package>.torch.<variant>`."""
    op: Callable[..., Any] = getattr(importlib.import_module(f"{package}.torch"), variant)
    return op


def load_reference(variant: str, *, packed: bool = False, package: str = PACKAGE) -> Callable[..., Any]:
    """The plain mathematics of a variant, differentiable and exact to the dtype it is given."""
    module = importlib.import_module(f"{package}.{variant}.torch_reference")
    reference: Callable[..., Any] = module.packed_reference if packed else module.reference
    return reference


def draw_inputs(
    entry: Mapping[str, Any],
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str,
    scalars: Mapping[str, int | float] | None = None,
    own_grads: bool = True,
    seed: int = 0,
    values: bool = True,
) -> Inputs:
    """Random arguments for the variant of one manifest entry; scalars that are not given suit the length.

    Without `values` they are zeros, which take memory only when they are read.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if not values:
            return torch.zeros(sizes, device=device, dtype=dtype)
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    q = normal(shape.batch, shape.heads, shape.seq, shape.dim, dtype=dtype)
    k = normal(shape.batch, shape.kv_heads, shape.seq, shape.dim, dtype=dtype)
    v = normal(shape.batch, shape.kv_heads, shape.seq, shape.head_dim_v, dtype=dtype)
    numbers = {name: _suited(entry, name, shape.seq) for name in entry["scalars"]} | dict(scalars or {})
    tensors = {
        name: _draw_tensor(name, declared, _sizes(entry, declared, shape, numbers), normal)
        for name, declared in entry["tensors"].items()
    }
    trained = {name for name, declared in entry["tensors"].items() if declared["grad"]}
    if entry["sink"]:
        tensors["sink"] = normal(shape.heads)
        trained.add("sink")
    if entry["decay"]:
        tensors["g"] = torch.nn.functional.logsigmoid(normal(shape.batch, shape.seq, shape.heads) + 2)
        trained.add("g")
    for leaf in (q, k, v, *(tensors[name] for name in trained if own_grads)):
        leaf.requires_grad_()
    if entry["dropout"]:
        # A scale of two is exact: the bounds on errors stay those of a call without dropout.
        numbers = {"dropout_p": 0.5, "seed": 2**40 + seed} | numbers
    return Inputs(
        q=q,
        k=k,
        v=v,
        do=normal(shape.batch, shape.heads, shape.seq, shape.head_dim_v, dtype=dtype),
        dlse=normal(shape.batch, shape.heads, shape.seq),
        tensors=tensors,
        scalars=numbers,
    )


def _suited(entry: Mapping[str, Any], name: str, seq: int) -> int | float:
    """A scalar's example, or a number that suits most variants. An int is at most a third of the sequence, so that a
    window cuts something, unless the scalar's range requires more."""
    low, high = entry["scalar_ranges"][name]
    example = entry["scalar_examples"][name]
    value: int | float = 0.5 if example is None else example
    if entry["scalars"][name] == "int":
        value = seq // 3 if example is None else min(example, seq // 3)
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def _sizes(
    entry: Mapping[str, Any], declared: Mapping[str, Any], shape: Shape, numbers: Mapping[str, int | float]
) -> list[int]:
    """The sizes of a tensor's dims; a free one has four elements."""
    known = {"b": shape.batch, "h": shape.heads, "hkv": shape.kv_heads}
    known |= dict.fromkeys(("q_idx", "kv_idx", "q_len", "kv_len"), shape.seq)
    known |= {name: number for name, number in numbers.items() if isinstance(number, int)}
    kinds = {name: ScalarType(kind) for name, kind in entry["scalars"].items()}
    specs = [TensorSpec(name=name, dims=tuple(each["dims"])) for name, each in entry["tensors"].items()]
    spec = TensorSpec(name="", dims=tuple(declared["dims"]))
    spec = dims.with_computed(spec, kinds, dims.own_names(specs, kinds))
    return [dims.size_of(dim, spec, known, 4) for dim in spec.dims]


def _draw_tensor(name: str, declared: Mapping[str, Any], sizes: Sequence[int], normal: Callable[..., Tensor]) -> Tensor:
    """A tensor of these sizes, filled with its example; without one, integers are 0 or 1, so that they may index a free
    dim."""
    values = normal(*sizes)
    dtype: torch.dtype = getattr(torch, declared["dtype"])
    if declared["example"]:
        return _example(name, declared, sizes).to(values.device, dtype)
    return (values * 0.1).to(dtype) if dtype.is_floating_point else (values > 0).to(dtype)


def _example(name: str, declared: Mapping[str, Any], sizes: Sequence[int]) -> Tensor:
    """The example of a tensor, computed in int64 and float64."""
    tensor = TensorSpec(name=name, dims=tuple(declared["dims"]), dtype=declared["dtype"])
    printer = torch_printer(lambda *_: True, float_cast=lambda text: f"{text}.double()")
    text = printer.text(parse_example(declared["example"], tensor))
    # The text is printed from a parsed expression, so that it holds only arithmetic and functions of torch.
    ranks = range(len(sizes))
    axes = [torch.arange(sizes[axis]).view([-1 if other == axis else 1 for other in ranks]) for axis in ranks]
    named = {f"i{axis}": positions for axis, positions in enumerate(axes)}
    named |= {str(dim): positions for dim, positions in zip(tensor.dims, axes, strict=True)}
    return torch.as_tensor(eval(text, {"torch": torch, **named})).expand(sizes).clone()


def evaluate(op: Callable[..., Any], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o, lse and the gradient of every leaf, each named after its leaf: dq, dk, ..."""
    o, lse = inputs.call(op, return_lse=True, **options)
    leaves = inputs.leaves()
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (inputs.do, inputs.dlse))
    results = {"o": o, "lse": lse} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: result.detach() for name, result in results.items()}


def relative_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest error of each tensor, divided by the largest element of the wanted one; infinite if there is a NaN."""
    errors = {}
    for name, wanted in want.items():
        worst = ((got[name].double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
        errors[name] = math.inf if math.isnan(worst) else worst
    return errors


def evaluate_plain(op: Callable[..., Any], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o and the gradient of every leaf, as in a training step, whose loss does not depend on lse."""
    o = inputs.call(op, **options)
    leaves = inputs.leaves()
    grads = torch.autograd.grad(o, list(leaves.values()), inputs.do)
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def packed(entry: Mapping[str, Any], inputs: Inputs) -> Inputs:
    """The rows of a dense batch laid end to end: `[B * S, H, D]`, dlse `[H, B * S]`.

    The variant's own tensors may have an element per token, per head and query, or per pair, or have no batch axis.
    """

    def joined(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_(x.requires_grad)

    def own(name: str, x: Tensor) -> Tensor:
        dims = entry["tensors"][name]["dims"] if name in entry["tensors"] else ["b", "q_idx"] if name == "g" else []
        if dims == ["b", "h", "q_idx", "kv_idx"]:
            heads = [torch.block_diag(*head) for head in x.detach().transpose(0, 1)]
            return torch.stack(heads).to(x.dtype).requires_grad_(x.requires_grad)
        if dims == ["b", "h", "q_idx"]:
            return x.detach().transpose(0, 1).flatten(1).requires_grad_(x.requires_grad)
        per_token = len(dims) > 1 and dims[0] == "b" and dims[1] in ("q_idx", "kv_idx")
        return x.detach().flatten(0, 1).requires_grad_(x.requires_grad) if per_token else x

    q, k, v, do = (joined(x) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    tensors = {name: own(name, x) for name, x in inputs.tensors.items()}
    return replace(inputs, q=q, k=k, v=v, do=do, dlse=inputs.dlse.transpose(0, 1).flatten(1), tensors=tensors)


def make_schedule(op: Any, inputs: Inputs, **options: Any) -> Any:
    """`op.schedule(...)` of q, k, v and the tensors and scalars that it takes."""
    taken = inspect.signature(op.schedule).parameters
    own = {name: value for name, value in (inputs.tensors | inputs.scalars).items() if name in taken}
    return op.schedule(inputs.q, inputs.k, inputs.v, **own, **options)


def draw_call(
    variant: str,
    mode: str,
    dtype: str,
    head_dim: int,
    *,
    seq: int,
    device: str,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    package: str = PACKAGE,
) -> tuple[Inputs, dict[str, Any]]:
    """Arguments of a call in a mode, and separately the arguments that describe its sequences.

    There are `batch` sequences of `seq` positions. In a packed call `seq` is their mean length, and each length is from
    half to one and a half times the mean. In a segmented call each batch row has `seq` positions in SEGMENTS segments,
    whose lengths vary in the same way.
    """
    entry = load_manifest(package)[variant]
    shape = Shape(batch=batch, heads=kv_heads * group, kv_heads=kv_heads, seq=seq, dim=head_dim)
    inputs = draw_inputs(entry, shape, dtype=getattr(torch, dtype), device=device)
    if mode == "dense":
        return inputs, {}
    if mode == "segmented":
        numbers = torch.arange(SEGMENTS).repeat(batch)
        lengths = torch.tensor([n for row in range(batch) for n in uneven_lengths(seq, SEGMENTS, row)])
        ids = torch.repeat_interleave(numbers, lengths).view(batch, seq)
        return inputs, {"q_segment_ids": ids.to(device, torch.int32)}
    ends = [0, *itertools.accumulate(uneven_lengths(batch * seq, batch, 0))]
    return packed(entry, inputs), {"cu_seqlens_q": torch.tensor(ends, dtype=torch.int32, device=device)}


def uneven_lengths(total: int, parts: int, seed: int) -> list[int]:
    """`parts` lengths that sum to `total`, each from half to one and a half times the mean, except for rounding.

    >>> uneven_lengths(1024, 1, 0), sum(uneven_lengths(1000, 8, 0))
    ([1024], 1000)
    """
    random = Random(seed)
    shares = [random.uniform(-1, 1) for _ in range(parts)]
    mean = sum(shares) / parts
    most = max((abs(share - mean) for share in shares), default=0) or 1
    ends = list(itertools.accumulate(1 + (share - mean) / most / 2 for share in shares))
    places = [0, *(round(end / parts * total) for end in ends[:-1]), total]
    return [end - begin for begin, end in itertools.pairwise(places)]
