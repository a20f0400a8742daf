# SPDX-License-Identifier: Apache-2.0
"""The forward and the backward of an op in JAX: as launches of its kernels, and as its reference.

A call's arrays are named operands. Everything else about the call is one hashable `Call`.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from ..core.checks import PACKED
from ..core.configs import PASSES, Tiles
from ..core.fp8 import SCALES
from ..core.launches import gradient_sizes, tiles_of
from ..core.sequences import ByRow
from ..kernels import TRAITS
from . import backend
from .tensor import FP32, Tensor

_OF_SCALES = dict(zip(SCALES, ("bh", "bk", "bk"), strict=True))
# The axes of q, k, v and o by layout: batch, heads, key heads, rows of queries and of keys, D and Dv.
_AXES = {
    "bhsd": {"q": "bhsd", "k": "bktd", "v": "bkte", "o": "bhse", "lse": "bhs", "decay": "bh."},
    "bshd": {"q": "bshd", "k": "btkd", "v": "btke", "o": "bshe", "lse": "bhs", "decay": "bh."},
    PACKED: {"q": "shd", "k": "tkd", "v": "tke", "o": "she", "lse": "hs", "decay": ".ht"},
}
LOGICAL = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
TOKENS = {
    "q_segment_ids": "bs",
    "kv_segment_ids": "bt",
    "q_positions": "bs",
    "kv_positions": "bt",
    "kv_lengths": "b",
    "row_offsets": "b",
}
BEGINS = ("cu_seqlens_q", "cu_seqlens_k")
TABLE = "table_"
"""The names of the tables of a schedule begin like this."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static part of a call: the names of its arrays in order, its layout, and its numbers by parameter."""

    operands: tuple[str, ...]
    layout: str
    numbers: tuple[tuple[str, Hashable], ...]
    wanted: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        return self.layout == PACKED

    def number(self, name: str) -> Any:
        return dict(self.numbers).get(name)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.operands, arrays, strict=True))

    def without_tables(self, *of_operands: Sequence[Any]) -> tuple[Any, ...]:
        """The call without a schedule, and sequences with one element for each operand without those of the tables.

        The tables of a schedule are true only for the batch rows, sequences and heads that it was made for. Launches
        make their own for any others.
        """
        kept = [not name.startswith(TABLE) for name in self.operands]
        call = replace(self, operands=tuple(compress(self.operands, kept)))
        return call, *(list(compress(each, kept)) for each in of_operands)


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernels:
    """The kernels of a variant in one mode of calls, and all else that its primitives need.

    Attributes:
        op: the name of the variant, with which error messages begin. mode: dense, packed or segmented.
        modules: the package of the mode, whose `launch` is imported when it is first read.
        reference: the plain reference. parameters: the parameters of the forward's launch that a call may give.
        dims: the dims of the variant's own tensors in this mode. scalars: the names of its own numbers.
        mask_only: the tensors that only the mask reads. gradients: the tensors that have a gradient.
        flags: tensor -> the parameter that asks for its gradient, if any.
        sums: names of the results of the backward's launch after dq, dk and dv. own_gradients: computes gradients, in
            the order of `gradients`, from these results. If it is None, the results are the gradients.
        splits_batch: whether batch rows may be folded into one call, or cut into several: they differ by nothing but
            the elements that they read. splits_heads: the same for heads.
        by_row: the rule for positions, if the op reads a tensor by row.
        split_keys: a function that computes o and lse of a call with few queries and many keys by splitting the keys.
            It returns None for any other call.
    """

    op: str
    mode: str
    modules: Any
    reference: Callable[..., Any]
    parameters: tuple[str, ...]
    dims: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    mask_only: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    own_gradients: Callable[..., tuple[Any, ...]] | None = None
    splits_batch: bool = True
    splits_heads: bool = True
    by_row: ByRow | None = None
    split_keys: Callable[[Call, Mapping[str, jax.Array]], list[jax.Array] | None] | None = None

    @property
    def name(self) -> str:
        """The variant and the mode, such as `causal_packed`."""
        return self.op if self.mode == "dense" else f"{self.op}_{self.mode}"

    @property
    def launches(self) -> Any:
        """The module with `forward` and `backward`, and `make_tables` where kernels read block tables."""
        return self.modules.launch

    @property
    def has_decay(self) -> bool:
        return "g" in self.dims

    def axes(self, name: str, call: Call) -> str:
        """A letter for each axis of an operand; a point for an axis that no other operand has."""
        own = _AXES[call.layout] | _OF_SCALES
        if name in own:
            return own[name]
        if name in ("do", "dlse"):
            return own[name[1:]]
        if name in TOKENS:
            return TOKENS[name]
        letters = {"b": "b", "h": "h", "hkv": "k", **({"q_idx": "s", "kv_idx": "t"} if call.packed else {})}
        return "".join(letters.get(str(dim), ".") for dim in self.dims.get(name, ()))

    def tables(self, call: Call, arrays: Sequence[jax.Array], backward: bool) -> tuple[jax.Array, ...]:
        """The tables of a schedule. Passes with the same blocks share their arrays."""
        if "block_tables" not in self.parameters:
            return ()
        given = keywords(self, call, call.named(arrays))
        made = self.launched(self.launches.make_tables, {**given, "passes": PASSES if backward else PASSES[:1]})
        return tuple(table.value() for table in made)

    def tiles(self, call: Call, arrays: Sequence[jax.Array]) -> Tiles:
        """The tiles of each pass of a call."""
        given = keywords(self, call, call.named(arrays))
        tokens = given.get("cu_seqlens_q", given.get("q_segment_ids"))
        lengths = TRAITS[self.op].run_lengths
        runs = [given[length] if isinstance(length, str) else length for length in lengths]
        return tiles_of(backend, self.op, self.mode, given["q"], given["v"], given["options"], tokens, runs=runs)

    def launched(self, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Call a function of the launches with the arguments in `given` that it takes; None for missing ones."""
        names = [name for name in inspect.signature(function).parameters if name != "backend"]
        return function(backend, **{name: given.get(name) for name in names})

    def result_axes(self, call: Call, *, backward: bool) -> list[str]:
        if backward:
            return [self.axes(name, call) for name in ("q", "k", "v", *call.wanted)]
        return [self.axes(name, call) for name in ("o", "lse", *(["decay"] if self.has_decay else []))]

    def may_split(self, call: Call) -> tuple[bool, bool]:
        """Whether batch rows, and heads, may be regrouped: not with dropout, which depends on their numbers."""
        drops = bool(call.number("dropout_p"))
        return self.splits_batch and not drops, self.splits_heads and not drops


class Forward:
    """The forward as launches and as reference: `(o, lse)`, and the cumulative decay for the backward."""

    backward = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        q, v = avals["q"], avals["v"]
        o = (*q.shape[:-1], v.shape[-1])
        b, h, s = _batch_heads_rows(q, call)
        found = [(o, q.dtype), ((h, s) if call.packed else (b, h, s), FP32)]
        if self.kernels.has_decay:
            g = avals["g"]
            found.append(((1, h, g.shape[0]) if call.packed else (b, h, g.shape[1]), FP32))
        return found

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        kernels = self.kernels
        split = None if kernels.split_keys is None else kernels.split_keys(call, call.named(arrays))
        if split is not None:
            return split
        results = kernels.launched(kernels.launches.forward, keywords(kernels, call, call.named(arrays)))
        return [x.value() for x in results]

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        # This raises the errors that kernels on the CPU would raise, such as for the family of another chip.
        self.kernels.tiles(call, [with_known_sizes(x) for x in arrays])
        return self.plain(call, arrays)

    def plain(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the reference, on any platform."""
        operands = call.named(arrays)
        o, lse = _reference(self.kernels, call, operands)
        shapes = self.shapes(call, operands)
        return [o, lse.astype(FP32), *(jnp.zeros(shape, dtype) for shape, dtype in shapes[2:])]


class Decay(Forward):
    """A forward that computes only the running sum of a log-decay. o and lse are zeros."""

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        given, shapes = keywords(self.kernels, call, call.named(arrays)), self.shapes(call, call.named(arrays))
        decay = given["q"].new_empty(shapes[2][0], dtype=FP32)
        if decay.numel() > 0:
            sequences = (given["cu_seqlens_k"],) if call.packed else ()
            self.kernels.launches.fill_decay(backend, given["g"], *sequences, decay)
        return [*(jnp.zeros(*shape) for shape in shapes[:2]), decay.value()]

    def plain(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Zeros, because the reference computes the running sum itself."""
        return [jnp.zeros(*shape) for shape in self.shapes(call, call.named(arrays))]


class Backward:
    """The backward as launches, or as the derivative of the reference: dq, dk, dv and the wanted own gradients."""

    backward = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        wide, names = _wide_names(call), ("q", "k", "v", *call.wanted)
        return [(avals[name].shape, _wide(avals[name]) if name in wide else avals[name].dtype) for name in names]

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        kernels, operands = self.kernels, call.named(arrays)
        given = keywords(kernels, call, operands)
        given |= {flag: name in call.wanted for name, flag in kernels.flags.items()}
        dq, dk, dv, *found = kernels.launched(kernels.launches.backward, given)
        if kernels.own_gradients is not None:
            sums = dict(zip(kernels.sums, found, strict=True))
            found = kernels.own_gradients(**{**given, **gradient_sizes(given), **sums})
        gradients = [x.value() if isinstance(x, Tensor) else x for x in (dq, dk, dv, *found)]
        own = dict(zip(kernels.gradients, gradients[3:], strict=True))
        return [*gradients[:3], *(own[name] for name in call.wanted)]

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        operands = call.named(arrays)
        names = ("q", "k", "v", *call.wanted)
        do, dlse = operands.pop("do"), operands.pop("dlse", None)
        wide = _wide_names(call)
        dtypes = {name: operands[name].dtype for name in names if name not in wide}
        # o has the dtype of q. A wide q keeps o of some of the keys, and its gradient, from being rounded to 16 bits.
        widened = {"q", *wide} if wide else ()
        operands |= {name: operands[name].astype(_wide(operands[name])) for name in widened}

        def outputs(*trained: jax.Array) -> Any:
            o, lse = _reference(self.kernels, call, operands | dict(zip(names, trained, strict=True)))
            return o.astype(operands["q"].dtype), lse.astype(FP32)

        (o, lse), pullback = jax.vjp(outputs, *(operands[name] for name in names))
        if wide:
            do, dlse = _of_part(do, dlse, (operands["o"], operands["lse"]), o, lse, call)
        found = pullback((do, jnp.zeros_like(lse) if dlse is None else dlse))
        return [x.astype(dtypes.get(name, x.dtype)) for name, x in zip(names, found, strict=True)]


def with_known_sizes(x: jax.Array) -> Any:
    """The type of an array, with 1 for each symbolic size. `jax.export` has these; no error about tiles depends on
    them."""
    return jax.ShapeDtypeStruct([size if isinstance(size, int) else 1 for size in x.shape], x.dtype)


def _wide_names(call: Call) -> tuple[str, ...]:
    """The operands whose gradients are float32 whatever the dtype of the operand."""
    options = call.number("options")
    return (*(["q"] if options.wide_queries else []), *(["k", "v"] if options.wide_keys else []))


def _wide(x: Any) -> Any:
    """The dtype of a gradient that is a part of a sum."""
    return jnp.promote_types(x.dtype, FP32)


def _of_part(
    do: jax.Array, dlse: jax.Array | None, whole: tuple[jax.Array, jax.Array], o: jax.Array, lse: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array]:
    """The gradients of o and lse of some of the keys, from do and dlse of all keys, whose o and lse are `whole`.

    `of_part` in `runtime/torch/plain.py` computes the same.
    """
    rows, heads = (call.layout.find(letter) for letter in "sh") if not call.packed else (0, 1)
    whole_o, whole_lse = whole
    share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - whole_lse))

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, -1, -2) if rows < heads else x

    less = by_row(((_rounded(o, whole_o.dtype) - whole_o) * do).sum(-1))
    dlse = less if dlse is None else less + dlse
    return do * by_row(share)[..., None], share * dlse


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in its own dtype, with its values rounded to `dtype`. XLA may leave out a conversion to `dtype` and back."""
    limits = jnp.finfo(dtype)
    found = jax.lax.reduce_precision(x, limits.nexp, limits.nmant)
    # reduce_precision gives 0 for values below the smallest normal number.
    return jnp.where(jnp.abs(x) < limits.tiny, x.astype(dtype).astype(x.dtype), found)


def _batch_heads_rows(q: Any, call: Call) -> tuple[int, int, int]:
    if call.packed:
        return 1, q.shape[1], q.shape[0]
    b, h, s, _ = (q.shape[axis] for axis in LOGICAL[call.layout])
    return b, h, s


def keywords(kernels: Kernels, call: Call, operands: dict[str, jax.Array]) -> dict[str, Any]:
    """The arguments of the launches: tensors for a call's arrays, numbers, and None for all that it does not give."""
    b, _, q_len = _batch_heads_rows(operands["q"], call)
    kv_len = operands["k"].shape[call.layout.find("s") if not call.packed else 0]
    sizes = {"b": b, "s": q_len, "t": kv_len}
    found: dict[str, Any] = dict.fromkeys(kernels.parameters)
    tables = []
    for name, array in operands.items():
        if name.startswith(TABLE):
            tables.append(Tensor.of(array))
        elif name in ("q", "k", "v", "o", "do"):
            found[name] = Tensor.packed(array) if call.packed else Tensor.of(array, LOGICAL[call.layout])
        elif name in TOKENS and name != "row_offsets":
            found[name] = Tensor.repeated(array, [sizes[axis] for axis in TOKENS[name]])
        else:
            found[name] = Tensor.of(array, element="uint64" if name == "seed" else "")
    found |= dict(call.numbers)
    if "block_tables" in found:
        found["block_tables"] = tables
    return found


def _reference(kernels: Kernels, call: Call, operands: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Call the reference, whose parameters have other names, with a call's arrays and numbers."""
    numbers: dict[str, Any] = dict(call.numbers)
    given = {n: x for n, x in {**numbers, **operands}.items() if n in kernels.dims or n in kernels.scalars}
    tokens: dict[str, Any] = {
        n: operands[n] for n in (*TOKENS, *BEGINS) if n in operands and n in kernels.parameters and n != "row_offsets"
    }
    if "padding_id" in numbers:
        tokens["padding_id"] = numbers["padding_id"]
    if not call.packed:
        tokens["layout"] = call.layout
    offset = operands.get("row_offsets", numbers.get("row_offset", 0))
    q, k, v = operands["q"], operands["k"], operands["v"]
    o, lse = kernels.reference(q, k, v, **given, **tokens, scale=numbers["scale"], q_offset=offset, return_lse=True)
    return o, lse
