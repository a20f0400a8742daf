# SPDX-License-Identifier: Apache-2.0
"""The packed calls of a rank: its rows of several documents in as few calls as possible. numpy alone is imported.

Documents are those of a layout's `cu_seqlens`. Sequence i of each call is document i, empty if the call has none of its
rows. Where the number of a sequence does not matter, `keyed_calls` leaves out the documents that a rank has no rows of:
kernels are chosen by the average length of the sequences.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from .shards import Chunk, Layout, rows_ahead
from .work import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCall:
    """Rows of a rank that one packed call computes, at most one run of each document.

    Attributes:
        rows: the index of each row among the rank's rows, int64 `[M]`; -1 for a row of zeros ahead of a run.
        sequence_rows: the index of each row, rows ahead included, among the rows of the whole call, int64 `[M]`.
        begins: cu_seqlens_q. offsets: the position of the first query of each document.
    """

    rows: Array
    sequence_rows: Array
    begins: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each document, rows ahead included."""
        return [end - begin for begin, end in pairwise(self.begins)]

    @property
    def span(self) -> Chunk | None:
        """The first of the rank's rows and their number, if they are consecutive and none is ahead; else None."""
        return _span(self.rows)

    @property
    def sequence_span(self) -> Chunk | None:
        """As `span`, in rows of the whole call."""
        return _span(self.sequence_rows)

    @cached_property
    def own(self) -> Array:
        """Indices of the call's rows that are rows of the rank, not rows ahead: int64."""
        return np.flatnonzero(self.rows >= 0)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of rows of one document.

    `document` is the document's number, `position` the first row's position in it, `at` that row's index in the rank.
    """

    document: int
    position: int
    length: int
    at: int


def pieces_of(cu_seqlens: Sequence[int], runs: Sequence[Chunk]) -> list[Piece]:
    """The rows of a rank, cut where documents end."""
    found, at = [], 0
    for begin, length in runs:
        number = bisect_right(cu_seqlens, begin) - 1
        while number + 1 < len(cu_seqlens) and cu_seqlens[number] < begin + length:
            start = cu_seqlens[number]
            low, high = max(begin, start), min(begin + length, cu_seqlens[number + 1])
            if low < high:
                found.append(Piece(document=number, position=low - start, length=high - low, at=at + low - begin))
            number += 1
        at += length
    return found


def count_calls(cu_seqlens: Sequence[int], chunks: Sequence[Sequence[Chunk]]) -> int:
    """The number of packed calls of the rank with the most: the most runs of one document that any rank has.

    >>> count_calls((0, 8, 16), [[(0, 2), (6, 2), (8, 4)], [(2, 4), (12, 4)]])
    2
    """
    seq, most = cu_seqlens[-1], 1
    for own in chunks:
        runs: Counter[int] = Counter()
        for begin, length in joined([chunk for chunk in own if chunk[0] < seq]):
            # Only this run's first and last document may have rows in other runs: those between are whole.
            first, last = bisect_right(cu_seqlens, begin) - 1, bisect_left(cu_seqlens, min(begin + length, seq)) - 1
            runs.update({first, last})
        most = max([most, *runs.values()])
    return most


def joined(runs: Sequence[Chunk]) -> list[Chunk]:
    """Runs of rows, adjacent ones joined."""
    found: list[Chunk] = []
    for begin, length in runs:
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((begin, length))
    return found


def packed_calls(layout: Layout, rank: int, *, drops: bool) -> list[PackedCall]:
    """The packed calls of a rank: as many as the most runs that it has of one document.

    Args:
        drops: the calls have dropout, and therefore begin some rows ahead of a run.
    """
    return [packed_call(layout, layer, drops=drops) for layer in packed_layers(layout, rank)]


def packed_layers(layout: Layout, rank: int) -> list[dict[int, Piece]]:
    """The runs of rows of each packed call of a rank, by document."""
    assert layout.cu_seqlens is not None
    layers: list[dict[int, Piece]] = []
    for piece in pieces_of(layout.cu_seqlens, layout.runs(rank)):
        layer = next((each for each in layers if piece.document not in each), None)
        if layer is None:
            layer = {}
            layers.append(layer)
        layer[piece.document] = piece
    return layers


def packed_call(layout: Layout, pieces: dict[int, Piece], *, drops: bool) -> PackedCall:
    """The packed call of some runs of rows, at most one of each document."""
    assert layout.cu_seqlens is not None
    rows, sequence_rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    lengths, offsets = np.zeros(len(layout.cu_seqlens) - 1, np.int64), np.zeros(len(layout.cu_seqlens) - 1, np.int64)
    for number, piece in sorted(pieces.items()):
        begin = layout.cu_seqlens[number] + piece.position
        ahead = rows_ahead(layout, begin) if drops else 0
        rows += [np.full(ahead, -1), np.arange(piece.at, piece.at + piece.length)]
        sequence_rows.append(np.arange(begin - ahead, begin + piece.length))
        lengths[number], offsets[number] = piece.length + ahead, piece.position - ahead
    begins = np.concatenate([[0], np.cumsum(lengths)])
    return PackedCall(
        rows=np.concatenate(rows),
        sequence_rows=np.concatenate(sequence_rows),
        begins=tuple(begins.tolist()),
        offsets=tuple(offsets.tolist()),
    )


def _span(rows: Array) -> Chunk | None:
    if len(rows) == 0:
        return 0, 0
    first = int(rows[0])
    return (first, len(rows)) if first >= 0 and np.array_equal(rows, np.arange(first, first + len(rows))) else None


@dataclass(frozen=True, kw_only=True)
class KeyRows:
    """The keys of a rank's calls: the keys of all documents of which the rank has rows.

    Attributes:
        runs: rows of the whole call, in order. begins: cu_seqlens_k, in which other documents are empty.
    """

    runs: tuple[Chunk, ...]
    begins: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.begins[-1]

    @cached_property
    def rows(self) -> Array:
        """The keys as rows of the whole call, int64 `[count]`."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, begin + n) for begin, n in self.runs)])


def own_documents(layout: Layout, rank: int) -> list[int]:
    """The documents that a rank has rows of, in order."""
    assert layout.cu_seqlens is not None
    return sorted({piece.document for piece in pieces_of(layout.cu_seqlens, layout.runs(rank))})


def key_rows(layout: Layout, rank: int) -> KeyRows:
    """The keys of a rank's documents."""
    assert layout.cu_seqlens is not None
    numbers, ends = set(own_documents(layout, rank)), layout.cu_seqlens
    lengths = [ends[i + 1] - ends[i] if i in numbers else 0 for i in range(len(ends) - 1)]
    runs = joined([(ends[i], n) for i, n in enumerate(lengths) if n])
    return KeyRows(runs=tuple(runs), begins=(0, *np.cumsum(lengths).tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedCall:
    """A packed call of a rank with its keys: those of the documents from the first to the last that it has rows of.

    Attributes:
        call: its rows. keys: the first of the rank's keys that the call has, and their number. begins: cu_seqlens_k.
    """

    call: PackedCall
    keys: Chunk
    begins: tuple[int, ...]


def keyed_calls(layout: Layout, rank: int, *, drops: bool, numbered: bool) -> list[KeyedCall]:
    """The packed calls of a rank with their keys.

    Args:
        drops: as for `packed_calls`. numbered: sequence i of a call is document i; else a call has only the documents
            between its first and its last that the rank has rows of.
    """
    of_rank, documents = key_rows(layout, rank).begins, own_documents(layout, rank)
    found = []
    for call in packed_calls(layout, rank, drops=drops):
        used = [number for number, length in enumerate(call.lengths) if length] or [0]
        first, end = of_rank[used[0]], of_rank[used[-1] + 1]
        begins = tuple(min(max(begin, first), end) - first for begin in of_rank)
        if not numbered:
            own = [number for number in documents if used[0] <= number <= used[-1]]
            offsets = tuple(call.offsets[number] for number in own)
            call = replace(call, begins=_begins_of(call.begins, own), offsets=offsets)
            begins = _begins_of(begins, own)
        found.append(KeyedCall(call=call, keys=(first, end - first), begins=begins))
    return found


def _begins_of(begins: Sequence[int], documents: Sequence[int]) -> tuple[int, ...]:
    """`begins` of these documents alone, the only ones that have rows."""
    return tuple(accumulate((begins[number + 1] - begins[number] for number in documents), initial=0))


# ------------------------------------------------------------------------------------ calls of any rank, of equal sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceCalls:
    """One packed call of every rank, all with the same number of rows, so that one program serves every rank.

    The last sequence is padding.

    Attributes:
        rows: the index of each row in the rank, int32 `[ranks, M]`; beyond the rank's last row for rows of zeros.
        sequence_rows: the index of each row in the whole call, int32 `[ranks, M]`.
        begins: cu_seqlens_q, int32 `[ranks, documents + 2]`. offsets: q_offset, int32 `[ranks, documents + 1]`.
    """

    rows: Array
    sequence_rows: Array
    begins: Array
    offsets: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTables:
    """The packed calls of every rank.

    Attributes:
        in_order: there is one call, whose rows are the rank's rows, in order.
        back: the index of each row of a rank among the rows of all calls, one call after the other, int32
            `[ranks, local]`; beyond the last for padding.
    """

    calls: tuple[DeviceCalls, ...]
    in_order: bool
    back: Array


@lru_cache(maxsize=64)
def packed_tables(layout: Layout, drops: bool) -> PackedTables:
    """The packed calls of every rank. `drops`: they have dropout, and therefore begin some rows ahead of a run."""
    of_ranks = [packed_calls(layout, rank, drops=drops) for rank in range(layout.ranks)]
    count = max(map(len, of_ranks))
    nothing = packed_call(layout, {}, drops=drops)
    layers = [[own[i] if i < len(own) else nothing for own in of_ranks] for i in range(count)]
    in_order = count == 1 and all(call.span is not None and call.span[0] == 0 for call in layers[0])
    back = np.full((layout.ranks, layout.local), np.iinfo(np.int32).max, np.int32)
    found, at = [], 0
    for layer in layers:
        most = layout.local if in_order else max(len(call.rows) for call in layer)
        found.append(_padded(layer, most, layout.local))
        for rank, call in enumerate(layer):
            back[rank, call.rows[call.own]] = at + call.own
        at += most
    return PackedTables(calls=tuple(found), in_order=in_order, back=np.minimum(back, at))


def _padded(calls: Sequence[PackedCall], most: int, local: int) -> DeviceCalls:
    """The calls of all ranks, padded to `most` rows each."""

    def filled(rows: Array, value: int) -> Array:
        return np.append(np.where(rows < 0, value, rows), np.full(most - len(rows), value)).astype(np.int32)

    return DeviceCalls(
        rows=np.stack([filled(call.rows, local) for call in calls]),
        sequence_rows=np.stack([filled(call.sequence_rows, 0) for call in calls]),
        begins=np.array([(*call.begins, most) for call in calls], np.int32),
        offsets=np.array([(*call.offsets, 0) for call in calls], np.int32),
    )
