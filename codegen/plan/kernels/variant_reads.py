"""What a variant's mask and score read: positions, elements of its own tensors, and functions that need a helper."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.analysis.call_modes import Mode
from codegen.analysis.grids import RunLength, block_runs, shared_runs
from codegen.analysis.schedule import Schedule, analyse
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
    reads = tensor_reads(variant)
    return tuple(dict.fromkeys(length for load in reads for length in shared_runs(load, variant.tensors, mode)))


def tile_runs(variant: Variant) -> tuple[RunLength, ...]:
    """The lengths of the runs of positions that tiles should not lie across: those whose blocks the mask chooses by a
    tensor, each once. Empty if blocks need no lists."""
    if variant.mask is None or analyse(variant.mask).schedule is not Schedule.LISTS:
        return ()
    return block_runs(variant.mask)


def tensor_reads(variant: Variant) -> tuple[Load, ...]:
    """Every distinct element of the variant's own tensors that its expressions read."""
    return expr.loads(*(e for e in (variant.mask, variant.score) if e is not None))
