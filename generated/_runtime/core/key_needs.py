# SPDX-License-Identifier: Apache-2.0
"""Which keys the rows of each rank may attend to, and how they get from rank to rank. numpy alone is imported.

Unlike the balance of a plan this decides results: whatever cannot be told counts as needed.
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
        own: what the mask reads. chunks: the rows of each rank.
        exact: None as well for a mask that reads tensors, whose elements a call would have to compare with the plan's.
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
    """Blocks of rows, and begin and end of keys that each may attend to, as rows of the whole call."""
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
    """Intervals as ascending runs, rounded out to blocks."""
    change = np.zeros(-(-seq // block) + 1, np.int64)
    np.add.at(change, begins // block, 1)
    np.add.at(change, -(-ends // block), -1)
    is_needed = np.cumsum(change)[:-1] > 0
    edges = np.flatnonzero(np.diff(is_needed, prepend=False, append=False)) * block
    return tuple(
        (int(begin), min(int(end), seq) - int(begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)
    )


def value_of(x: Any) -> int | float | str:
    """What a plan remembers of an argument: a number, or a digest of a tensor on the host."""
    if isinstance(x, (bool, int, float)):
        return x
    # numpy knows no bfloat16, in which every tensor may be.
    found = np.asarray(x.detach().double().cpu() if hasattr(x, "detach") else x)
    exact = found.astype(np.float64)
    return f"{list(exact.shape)} {hashlib.sha256(np.ascontiguousarray(exact).tobytes()).hexdigest()[:16]}"


def planned_needs(
    layout: Layout, work: VariantWork, given: Mapping[str, Any], *, knows_values: bool
) -> KeyNeeds | None:
    """The needs of a call; None if it has another mask than those of the plan, and needs all keys.

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
    """What one rank sends and receives, its own rows included.

    Attributes:
        send: rows of this rank for each rank, counted from its first. receive: rows of the sequence from each rank.
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
    """The rows of the sequence that a rank needs: none of documents of which it has no row."""
    found = _rows(needs.runs[rank])
    if layout.cu_seqlens is None:
        return found
    return np.intersect1d(found, key_rows(layout, rank).rows, assume_unique=True)


def _rows(runs: Sequence[Chunk]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, begin + length) for begin, length in runs)])


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTables:
    """How the keys of one rank are put together, and how their gradients are taken apart.

    Attributes:
        most: how many keys the rank with the most of them has.
        send, receive: of each other rank the rows sent to it, of this rank's, and the keys that come from it, of these.
        pieces: the keys in order as (source, first, number): 0 for rows of this rank, 1 for what came from others, one
            after the other, 2 for zeros.
        shared: rows of this rank of whose gradients other ranks have parts. shared_keys: which keys these are.
        parts: of each other rank which ones of `shared` it has parts of.
        sends: some rank sends something to another.
    """

    most: int
    send: tuple[Array, ...]
    receive: tuple[Array, ...]
    pieces: tuple[tuple[int, int, int], ...]
    shared: Array
    shared_keys: Array
    parts: tuple[Array, ...]
    sends: bool


OWN, RECEIVED, NONE = 0, 1, 2
"""Sources of the pieces of `KeyTables`."""


def key_tables(layout: Layout, needs: KeyNeeds, rank: int) -> KeyTables:
    """The tables of one rank, whose calls have the keys of its documents, or all."""
    found, local = routes(layout, needs, rank), layout.local
    others = [other for other in range(layout.ranks) if other != rank]
    if layout.cu_seqlens is None:
        rows, most = np.arange(layout.seq), layout.seq
    else:
        of_ranks = [key_rows(layout, each) for each in range(layout.ranks)]
        rows, most = of_ranks[rank].rows, max(each.count for each in of_ranks)
    send = tuple(found.send[other] for other in others)
    received = np.concatenate([np.zeros(0, np.int64), *(found.receive[other] for other in others)])
    source, place = np.full(layout.seq, NONE), np.zeros(layout.seq, np.int64)
    source[received], place[received] = RECEIVED, np.arange(len(received))
    owners = layout.places // local
    is_own = owners == rank
    source[is_own], place[is_own] = OWN, layout.places[is_own] - rank * local
    at_key = np.full(layout.seq, -1)
    at_key[rows] = np.arange(len(rows))
    shared = np.unique(np.concatenate([np.zeros(0, np.int64), *send]))
    return KeyTables(
        most=most,
        send=send,
        receive=tuple(at_key[found.receive[other]] for other in others),
        pieces=_pieces(source[rows], place[rows]),
        shared=shared,
        shared_keys=at_key[layout.order[rank * local : (rank + 1) * local][shared]],
        parts=tuple(np.searchsorted(shared, sent) for sent in send),
        sends=found.any_sends,
    )


def _pieces(source: Array, place: Array) -> tuple[tuple[int, int, int], ...]:
    """Runs of keys that follow each other where they come from."""
    if len(source) == 0:
        return ()
    is_next = (np.diff(source) == 0) & ((np.diff(place) == 1) | (source[1:] == NONE))
    begins = np.concatenate([[0], np.flatnonzero(~is_next) + 1])
    lengths = np.diff(np.append(begins, len(source)))
    return tuple(zip(source[begins].tolist(), place[begins].tolist(), lengths.tolist(), strict=True))


def missing_share(needs: KeyNeeds, chunks: Sequence[Sequence[Chunk]], seq: int) -> float:
    """The rows that the busiest rank receives or sends, as a share of those that it would gather."""
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
