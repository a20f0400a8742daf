"""What a variant's mask and score read: positions, elements of its own tensors, and functions that need a helper."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.analysis.call_modes import Mode
from codegen.analysis.grids import RunLength, shared_runs
from codegen.ir import expr
from codegen.ir.expr import Level, Load
from codegen.spec.model import Variant


def reads_query_position(variant: Variant, mode: Mode) -> bool:
    """Whether a kernel needs the query offset: the position of a query, or the row that dropout counts by it."""
    parts = [e for e in (variant.mask, variant.score) if e is not None]
    named = any({"q_idx", "q_row"} & expr.names(e) for e in parts)
    return variant.decay or variant.dropout or named or reads_packed_queries(variant, tensor_reads(variant), mode)


def reads_packed_queries(variant: Variant, reads: Sequence[Load], mode: Mode) -> bool:
    """Whether some of these tensors are packed like queries: the query offset then gives the row of a position."""
    return mode is Mode.PACKED and any("q_idx" in variant.tensors[load.tensor].dims for load in reads)


def positions_read(variant: Variant) -> tuple[str, ...]:
    """The positions that a variant's expressions read."""
    read = frozenset().union(*(expr.names(e) for e in (variant.mask, variant.score) if e is not None))
    return tuple(f"{axis}_positions" for axis in ("q", "kv") if f"{axis}_idx" in read)


def uses_tanh(variant: Variant) -> bool:
    """Whether the score calls tanh, for which some chips have an instruction."""
    return variant.score is not None and any(
        isinstance(node, expr.Op) and node.op == "tanh" for node in expr.walk(variant.score)
    )


def reads_pairs(variant: Variant) -> bool:
    """Whether some tensor is read per pair of a query and a key."""
    return any(expr.level(load) is Level.TILE for load in tensor_reads(variant))


def grid_runs(variant: Variant, mode: Mode) -> tuple[RunLength, ...]:
    """The lengths of the runs of positions that share elements of grids, each once."""
    return _runs_of(tensor_reads(variant), variant, mode)


def mask_runs(variant: Variant) -> tuple[RunLength, ...]:
    """The lengths of the runs of positions that share elements of the mask's grids, each once."""
    return () if variant.mask is None else _runs_of(expr.loads(variant.mask), variant, Mode.DENSE)


def _runs_of(reads: Sequence[Load], variant: Variant, mode: Mode) -> tuple[RunLength, ...]:
    return tuple(dict.fromkeys(length for load in reads for length in shared_runs(load, variant.tensors, mode)))


def tensor_reads(variant: Variant) -> tuple[Load, ...]:
    """Every distinct element of the variant's own tensors that its expressions read."""
    return expr.loads(*(e for e in (variant.mask, variant.score) if e is not None))
