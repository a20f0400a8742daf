# SPDX-License-Identifier: Apache-2.0
"""Which keys the rows of each rank may attend to, and how they get from rank to rank. numpy alone is imported.

Unlike the balance of a plan, the needs decide results: a key counts as needed unless the mask surely excludes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packed_rows import key_rows
from .shards import Chunk, KeyNeeds, Layout
from .work import Array, Rows, VariantWork, mask_calls, visit_table, visited_keys

_POSITIONS = ("q_positions", "kv_positions")
_IDS = ("q_segment_ids", "kv_segment_ids")


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
        own: the tensors and scalars that the mask reads. chunks: the rows of each rank.
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
    seq = int(rows.ends[-1])
    runs = []
    for own_chunks in chunks:
        is_own = np.zeros(len(rows.begins), bool)
        for begin, length in own_chunks:
            is_own |= (rows.begins < begin + length) & (rows.ends > begin)
        ours = is_own[blocks]
        runs.append(_union(begins[ours], ends[ours], rows.block, seq))
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


def _union(begins: Array, ends: Array, block: int, seq: int) -> tuple[Chunk, ...]:
    """The union of intervals as ascending runs, extended to whole blocks."""
    change = np.zeros(-(-seq // block) + 1, np.int64)
    np.add.at(change, begins // block, 1)
    np.add.at(change, -(-ends // block), -1)
    is_needed = np.cumsum(change)[:-1] > 0
    edges = np.flatnonzero(np.diff(is_needed, prepend=False, append=False)) * block
    return tuple(
        (int(begin), min(int(end), seq) - int(begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)
    )


def value_of(x: Any) -> int | float | str:
    """The form in which a plan keeps an argument: a number, or a digest of a tensor on the host."""
    if isinstance(x, (bool, int, float)):
        return x
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
    if x is None or (not knows_values and not isinstance(x, (bool, int, float))):
        return False
    return value_of(x) == value


# --- routes


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends to and receives from each rank, itself included.

    Attributes:
        send: for each rank, the rows sent to it, counted from this rank's first row.
        receive: for each rank, the rows that come from it, as rows of the sequence.
        any_sends: some rank sends something to another.
    """

    send: tuple[Array, ...]
    receive: tuple[Array, ...]
    any_sends: bool


def routes(layout: Layout, needs: KeyNeeds, rank: int) -> Routes:
    """The routes of one rank."""
    places = layout.places
    owners = places // layout.local
    needed = [_needed(layout, needs, each) for each in range(layout.ranks)]
    send = tuple(places[rows[owners[rows] == rank]] - rank * layout.local for rows in needed)
    receive = tuple(needed[rank][owners[needed[rank]] == other] for other in range(layout.ranks))
    return Routes(send, receive, any(bool((owners[keys] != each).any()) for each, keys in enumerate(needed)))


def _needed(layout: Layout, needs: KeyNeeds, rank: int) -> Array:
    """The rows of the sequence that a rank needs, without documents of which it has no row."""
    found = _rows(needs.runs[rank])
    if layout.cu_seqlens is None:
        return found
    return np.intersect1d(found, key_rows(layout, rank).rows, assume_unique=True)


def _rows(runs: Sequence[Chunk]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, begin + length) for begin, length in runs)])


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTables:
    """How the keys of one rank are put together, and how their gradients are taken apart.

    Each table has a row for each row that is written: the rows to add up, in this order, with -1 for none. The first
    column are rows of a tensor of this rank, the others rows of what came from other ranks, one rank after the other.

    Attributes:
        sent, received: how many keys go to each rank, and come from it; 0 for the rank itself.
        send: the own rows that are sent, int32 `[sum(sent), 1]`.
        keys: the rows that each key of this rank is taken from, int32 `[keys, 2]`; zeros if there are none.
        send_back: the keys whose gradients are sent back, int32 `[sum(received), 1]`.
        sums: the gradients that are added up for each own row: one of this rank's keys and the parts of other ranks,
            int32 `[local, 1 + parts]`.
        own_span: the first own row and the number of rows, if the keys are consecutive own rows; else None.
        most_received: the number of keys that the rank which receives most of them receives.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    send: Array
    keys: Array
    send_back: Array
    sums: Array
    own_span: Chunk | None
    most_received: int


def key_tables(layout: Layout, needs: KeyNeeds, rank: int) -> KeyTables:
    """The tables of one rank. Its calls have the keys of its documents, or all keys if the call is not packed."""
    local, ranks = layout.local, range(layout.ranks)
    owners = layout.places // local
    needed = [_needed(layout, needs, each) for each in ranks]
    moved = [
        [rows[owners[rows] == other] if other != each else rows[:0] for other in ranks]
        for each, rows in enumerate(needed)
    ]
    own_rows = layout.places - rank * local
    send = np.concatenate([own_rows[of_rank[rank]] for of_rank in moved])
    received = np.concatenate(moved[rank])

    rows = np.arange(layout.seq) if layout.cu_seqlens is None else key_rows(layout, rank).rows
    from_own, from_others, at_key = (np.full(layout.seq, -1) for _ in range(3))
    is_own = owners == rank
    from_own[is_own] = own_rows[is_own]
    from_others[received] = np.arange(len(received))
    at_key[rows] = np.arange(len(rows))

    of_own = np.full(local, -1)
    of_own[own_rows[is_own]] = at_key[is_own]
    keys = from_own[rows]
    is_span = len(keys) > 0 and keys[0] >= 0 and np.array_equal(keys, np.arange(keys[0], keys[0] + len(keys)))
    return KeyTables(
        sent=tuple(len(of_rank[rank]) for of_rank in moved),
        received=tuple(map(len, moved[rank])),
        send=_table(send),
        keys=_table(keys, from_others[rows]),
        send_back=_table(at_key[received]),
        sums=_table(of_own, *_occurrences(send, local).T),
        own_span=(int(keys[0]), len(keys)) if is_span else None,
        most_received=max(sum(map(len, of_rank)) for of_rank in moved),
    )


def _table(*columns: Array) -> Array:
    return np.ascontiguousarray(np.stack(columns, 1), np.int32)


def _occurrences(values: Array, count: int) -> Array:
    """Where each of the numbers below `count` occurs in `values`, ascending, `[count, most]`; -1 for no more places."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    number = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    found = np.full((count, number.max(initial=-1) + 1), -1)
    found[ordered, number] = order
    return found


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
