"""How kernels index tensors: which dims hold one element per token, and which indices may leave their axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from codegen.ir.expr import Expr, Load, TensorSpec, Var

WIDE_INDICES = ("b", "h", "hkv", "q_head")
"""Index names that kernels hold in 64 bits, because they are part of memory offsets. Where an expression uses one as a
value, it is cast to 32 bits like positions: a loop bound of 64 bits could not be a coordinate of a TMA copy."""

DECAY = TensorSpec(name="decay", dims=("b", "h", "pos"))
"""The cumulative sum of g, already times log2(e): `[B, Hq, P]`, contiguous; `[Hq, total_k]` of packed sequences."""

PACKED_DECAY = replace(DECAY, dims=DECAY.dims[1:])

POSITIONS = ("kv_idx", "k_row", DECAY.dims[2])
"""Dims known to hold every key position."""

TOKENS = (*POSITIONS, "q_idx")
"""Dims with an element per token."""


def exact_index(tensors: Mapping[str, TensorSpec], tensor: str, axis: int, index: Expr) -> bool:
    """Whether an index cannot leave its axis: a head or batch index over the dim of that name."""
    return isinstance(index, Var) and index.name in WIDE_INDICES and tensors[tensor].dims[axis] == index.name


def needs_clamp(tensors: Mapping[str, TensorSpec], load: Load, without: Sequence[int] = ()) -> bool:
    """True if an index of a read may lie outside the tensor, on an axis that is not in `without`."""
    indices = ((axis, i) for axis, i in enumerate(load.indices) if axis not in without)
    return any(not exact_index(tensors, load.tensor, axis, i) for axis, i in indices)
