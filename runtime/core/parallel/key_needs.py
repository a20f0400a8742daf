"""Which keys the rows of each rank may attend to. numpy alone is imported.

Unlike the balance of a plan, the needs decide results: a key counts as needed unless the mask surely excludes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .shards import Chunk, KeyNeeds, Layout
from .work import Array, Rows, VariantWork, mask_calls, visit_table, visited_keys

_POSITIONS = ("q_positions", "kv_positions")
_IDS = ("q_segment_ids", "kv_segment_ids")
_NUMBERS = (bool, int, float, np.generic)


def needs_of(
    work: VariantWork,
    rows: Rows,
    own: Mapping[str, Any],
    segment_ids: Array | None,
    chunks: Sequence[Sequence[Chunk]],
    *,
    exact: bool,
) -> KeyNeeds | None:
    """The keys that each rank needs under one mask; None if a plan cannot tell.

    Args:
        rows: cut where a chunk of `chunks` begins. own: the tensors and scalars that the mask reads. chunks: the rows
            of each rank.
        exact: return None for a mask that reads tensors, too: a call would have to compare their elements with the
            plan's.
    """
    by_head = any(work.axes(name, "h", "hkv") for name in work.needs)
    if by_head or not work.by_heads or work.by_batch or any(own.get(name) is None for name in work.needs):
        return None
    arguments = tuple((name, value_of(own[name])) for name in sorted(work.needs))
    if exact and any(isinstance(value, str) for _, value in arguments):
        return None
    blocks, begins, ends = (
        np.concatenate(each) for each in zip(*_intervals(work, rows, own, segment_ids), strict=True)
    )
    runs = []
    for own_chunks in chunks:
        is_own = np.zeros(len(rows.begins), bool)
        for begin, length in own_chunks:
            is_own |= (rows.begins < begin + length) & (rows.ends > begin)
        ours = is_own[blocks]
        runs.append(_union(begins[ours], ends[ours], rows))
    return KeyNeeds(op=work.op, arguments=arguments, runs=tuple(runs))


def _intervals(
    work: VariantWork, rows: Rows, own: Mapping[str, Any], segment_ids: Array | None
) -> list[tuple[Array, Array, Array]]:
    """Blocks of rows, and the begin and end of keys that each block may attend to, as rows of the whole call."""
    found = []
    for at, ids in mask_calls(work, rows, own, segment_ids):
        if work.may_visit is not None:
            visits, starts, step = visit_table(work, rows, at, ids)
            blocks, keys = np.nonzero(visits)
            ends = np.minimum(starts[keys] + step, rows.lengths[blocks])
            found.append((blocks, rows.starts[blocks] + starts[keys], rows.starts[blocks] + ends))
            continue
        for low, high in visited_keys(work, rows, at, ids):
            blocks = np.flatnonzero(np.broadcast_to(high > low, rows.begins.shape))
            low, high = (np.broadcast_to(x, rows.begins.shape)[blocks] for x in (low, high))
            found.append((blocks, rows.starts[blocks] + low, rows.starts[blocks] + high))
    return found


def _union(begins: Array, ends: Array, rows: Rows) -> tuple[Chunk, ...]:
    """The union of intervals as ascending runs, extended to whole blocks of rows."""
    change = np.zeros(len(rows.begins) + 1, np.int64)
    np.add.at(change, np.searchsorted(rows.ends, begins, "right"), 1)
    np.add.at(change, np.searchsorted(rows.begins, ends, "left"), -1)
    edges = np.flatnonzero(np.diff(np.cumsum(change)[:-1] > 0, prepend=False, append=False))
    found, last = rows.begins[edges[::2]], rows.ends[edges[1::2] - 1]
    return tuple(zip(found.tolist(), (last - found).tolist(), strict=True))


def value_of(x: Any) -> int | float | str:
    """The form in which a plan keeps an argument: a number, or a digest of a tensor on the host."""
    if isinstance(x, _NUMBERS):
        number: int | float = x.item() if isinstance(x, np.generic) else x
        return number
    # numpy has no bfloat16, the dtype that any of the tensors may have.
    found = np.asarray(x.detach().double().cpu() if hasattr(x, "detach") else x)
    exact = found.astype(np.float64)
    return f"{list(exact.shape)} {hashlib.sha256(np.ascontiguousarray(exact).tobytes()).hexdigest()[:16]}"


def planned_needs(
    layout: Layout, work: VariantWork, given: Mapping[str, Any], *, knows_values: bool
) -> KeyNeeds | None:
    """The keys that a call needs; None if its mask is none of the plan's, so that it needs all keys.

    Args:
        given: keywords of the call. knows_values: its tensors may be read on the host.
    """
    if any(given.get(name) is not None for name in _POSITIONS):
        return None
    if work.by_length and given.get("kv_lengths") is not None:
        return None
    if layout.segment_ids is not None and any(given.get(name) is not None for name in _IDS):
        return None
    for needs in layout.needs:
        if needs.op == work.op and all(
            _is_same(given.get(name), value, knows_values) for name, value in needs.arguments
        ):
            return needs
    return None


def _is_same(x: Any, value: int | float | str, knows_values: bool) -> bool:
    if x is None or (not knows_values and not isinstance(x, _NUMBERS)):
        return False
    return value_of(x) == value


def missing_share(needs: KeyNeeds, chunks: Sequence[Sequence[Chunk]], seq: int) -> float:
    """The rows that the busiest rank receives or sends, as a share of the rows that it would gather."""
    owner_edges = sorted((begin, begin + length, rank) for rank, own in enumerate(chunks) for begin, length in own)
    begins, ends, owners = (np.array(each) for each in zip(*owner_edges, strict=True))
    moved = np.zeros((len(chunks), len(chunks)), np.int64)
    for rank, runs in enumerate(needs.runs):
        for begin, length in runs:
            common = np.minimum(ends, begin + length) - np.maximum(begins, begin)
            np.add.at(moved[rank], owners, np.maximum(common, 0))
    np.fill_diagonal(moved, 0)
    gathered = seq - seq // len(chunks)
    return float(max(moved.sum(0).max(), moved.sum(1).max())) / max(gathered, 1)
