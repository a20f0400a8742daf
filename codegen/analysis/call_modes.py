"""The call modes, each with its own kernels, and how each rewrites a variant's expressions.

Dense: a batch `[B, H, S, D]`. Packed: sequences laid end to end, `[total, H, D]`. Segmented: a dense batch whose tokens
carry segment ids, and optionally positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, ScalarType, TensorSpec, Type, Var, int_var
from codegen.spec.model import ScalarSpec, Variant


class Mode(StrEnum):
    """How a call lays out its tokens."""

    DENSE = "dense"
    PACKED = "packed"
    SEGMENTED = "segmented"


POSITIONAL = ("q_idx", "kv_idx")
"""Dims with an element per token."""

QUERY_IDS = TensorSpec(name="q_segment_ids", dims=("b", "q_row"), dtype="int32")
KEY_IDS = TensorSpec(name="kv_segment_ids", dims=("b", "k_row"), dtype="int32")
PADDING = ScalarSpec(name="padding_id", type=ScalarType.INT)
KEY_LENGTHS = TensorSpec(name="kv_lengths", dims=("b",), dtype="int32")
"""Number of keys of each batch row: the value of `kv_len` in a segmented call. `q_len` is the number of query rows."""


def specialised(variant: Variant, mode: Mode) -> Variant:
    """The variant with its expressions rewritten for a call mode."""
    if mode is Mode.PACKED:
        return _packed(variant)
    return _segmented(variant) if mode is Mode.SEGMENTED else variant


def _packed(variant: Variant) -> Variant:
    """A tensor with an element per token is packed like the tokens, so it loses its batch axis."""
    axes = {name: packed_axes(spec.dims) for name, spec in variant.tensors.items()}
    tensors = {name: replace(spec, dims=packed_dims(spec.dims)) for name, spec in variant.tensors.items()}

    def read(load: Load, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(indices[axis] for axis in axes[load.tensor])

    return _rewritten(replace(variant, tensors=tensors), read)


def packed_dims(dims: Sequence[str | int]) -> tuple[str | int, ...]:
    """The dims of a tensor in a packed call."""
    return tuple(dims[axis] for axis in packed_axes(dims))


def packed_axes(dims: Sequence[str | int]) -> list[int]:
    """The axes that a tensor keeps in a packed call: a tensor with a token axis has no batch axis."""
    tokens = has_tokens(dims)
    return [axis for axis, dim in enumerate(dims) if not (dim == "b" and tokens)]


def has_tokens(dims: Sequence[str | int]) -> bool:
    """True if a tensor has an element per token."""
    return any(dim in POSITIONAL for dim in dims)


def _segmented(variant: Variant) -> Variant:
    """A pair attends if its segment ids are equal and not padding. Tensors are indexed by row, not by position."""

    def read(load: Load, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        dims = variant.tensors[load.tensor].dims
        return tuple(by_row(i) if dim in POSITIONAL else i for i, dim in zip(indices, dims, strict=True))

    b = int_var("b")
    reads_length = "kv_len" in names_read(variant)
    if reads_length:
        own_length = Load(Type.INT, KEY_LENGTHS.name, (b,))
        variant = _substituted(variant, {"kv_len": own_length})
        variant = replace(variant, tensors={**variant.tensors, KEY_LENGTHS.name: KEY_LENGTHS})
    found = _rewritten(variant, read)
    query = Load(Type.INT, QUERY_IDS.name, (b, int_var("rows")))
    key = Load(Type.INT, KEY_IDS.name, (b, int_var("cols")))
    same = expr.logical_and(expr.compare("eq", query, key), expr.compare("ne", key, int_var(PADDING.name)))
    return replace(
        found,
        mask=same if found.mask is None else expr.logical_and(found.mask, same),
        tensors={**found.tensors, QUERY_IDS.name: QUERY_IDS, KEY_IDS.name: KEY_IDS},
        scalars={**found.scalars, PADDING.name: PADDING},
    )


def names_read(variant: Variant) -> frozenset[str]:
    """The names that mask and score read."""
    return frozenset().union(*(expr.names(e) for e in (variant.mask, variant.score) if e is not None))


def _substituted(variant: Variant, values: Mapping[str, Expr]) -> Variant:
    mask, score = (None if e is None else expr.substitute(e, values) for e in (variant.mask, variant.score))
    return replace(variant, mask=mask, score=score)


def split_mask(mask: Expr) -> tuple[Expr, Expr]:
    """The mask of a segmented variant, split into the variant's own part and the comparison of segment ids."""
    parts = expr.conjuncts(mask)
    of_segments = [part for part in parts if any(load.tensor == KEY_IDS.name for load in expr.loads(part))]
    own = [part for part in parts if part not in of_segments]
    return expr.logical_and(*own), expr.logical_and(*of_segments)


def by_row(index: Expr) -> Expr:
    """An index by row instead of by position. Indices inside a nested read stay: its tensor's dims decide them."""
    rows = {"q_idx": int_var("q_row"), "kv_idx": int_var("cols")}

    def replaced(e: Expr) -> Expr | None:
        return e if isinstance(e, Load) else rows.get(e.name) if isinstance(e, Var) else None

    return expr.rebuild(index, replaced)


def _rewritten(variant: Variant, read: Callable[[Load, tuple[Expr, ...]], tuple[Expr, ...]]) -> Variant:
    """The variant with rewritten tensor indices: `read` maps a load and its rewritten indices to new indices."""

    def replaced(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return None
        return Load(e.type, e.tensor, read(e, tuple(expr.rebuild(i, replaced) for i in e.indices)))

    def whole(e: Expr | None) -> Expr | None:
        return None if e is None else expr.rebuild(e, replaced)

    return replace(variant, mask=whole(variant.mask), score=whole(variant.score))


def decay_positions(mode: Mode) -> Mapping[str, str]:
    """The names that index the log-decay: rows in a segmented call, positions elsewhere."""
    return {"q": "q_row", "kv": "cols"} if mode is Mode.SEGMENTED else {"q": "q_idx", "kv": "kv_idx"}
