# SPDX-License-Identifier: Apache-2.0
"""How the keys that ranks need get from rank to rank, and the gradients of keys back. numpy alone is imported.

Rows that move are runs of rows, of which there are few, so that the tables of a new layout take little time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from .packed_rows import key_rows
from .shards import Chunk, KeyNeeds, Layout
from .work import Array

Table = TypeVar("Table")
Moved = TypeVar("Moved")
"""An array or a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pieces:
    """Parts of runs of rows, each inside one of some other runs: int64 arrays with an element for each part.

    Attributes:
        begin, length: the first row of each part, and the number of its rows. number: the other run that it is in.
        at: the place of its first row in the tensor that has the rows of the other runs.
    """

    begin: Array
    length: Array
    number: Array
    at: Array

    def of(self, chosen: Array) -> "_Pieces":
        """Some of these pieces, by a mask or by their numbers."""
        return _Pieces(
            begin=self.begin[chosen], length=self.length[chosen], number=self.number[chosen], at=self.at[chosen]
        )


def _pieces(begins: Array, ends: Array, others: Sequence[Chunk], places: Array) -> _Pieces:
    """The parts of runs that are inside other, ascending runs. places: the place of each other run's first row."""
    other_begins, lengths = np.array(others, np.int64).reshape(-1, 2).T
    other_ends = other_begins + lengths
    first = np.searchsorted(other_ends, begins, "right")
    count = np.maximum(np.searchsorted(other_begins, ends, "left") - first, 0)
    own, number = np.repeat(np.arange(len(begins)), count), _rows(first, count)
    begin = np.maximum(begins[own], other_begins[number])
    length = np.minimum(ends[own], other_ends[number]) - begin
    return _Pieces(begin=begin, length=length, number=number, at=places[number] + begin - other_begins[number])


def _rows(begins: Array, lengths: Array) -> Array:
    """The rows of runs, one run after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(begins - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def _places(runs: Sequence[Chunk]) -> Array:
    """The place of each run's first row, if runs are put one after the other."""
    return np.cumsum([0, *(length for _, length in runs)])[:-1]


class _Moves:
    """Which rows each rank needs, and who has them.

    Attributes:
        needed: for each rank, the runs of rows that it needs, cut where the owner changes. `at` counts the owner's
            rows. owners: the owner of each of these runs.
    """

    def __init__(self, layout: Layout, needs: KeyNeeds) -> None:
        of_ranks = [layout.runs(rank) for rank in range(layout.ranks)]
        runs = sorted(
            (run, rank, int(place))
            for rank, own in enumerate(of_ranks)
            for run, place in zip(own, _places(own), strict=True)
        )
        chunks, ranks, places = [run for run, *_ in runs], *np.array([rest for _, *rest in runs], np.int64).T
        self.needed = []
        for rank in range(layout.ranks):
            begins, lengths = np.array(needs.runs[rank], np.int64).reshape(-1, 2).T
            if layout.cu_seqlens is not None:
                # Documents of which the rank has no row are left out.
                documents = key_rows(layout, rank).runs
                own = _pieces(begins, begins + lengths, documents, np.zeros(len(documents), np.int64))
                begins, lengths = own.begin, own.length
            self.needed.append(_pieces(begins, begins + lengths, chunks, places))
        self.owners = [ranks[pieces.number] for pieces in self.needed]

    def sent(self, owner: int, rank: int) -> _Pieces:
        """The runs of `owner` that `rank` needs, in the order of the sequence."""
        return self.needed[rank].of(self.owners[rank] == owner)


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends to and receives from each rank, itself included.

    Attributes:
        send: for each rank, the rows sent to it, counted from this rank's first row.
        receive: for each rank, the rows that come from it, as rows of the sequence.
    """

    send: tuple[Array, ...]
    receive: tuple[Array, ...]


def routes(layout: Layout, needs: KeyNeeds) -> list[Routes]:
    """The routes of each rank."""
    moves, ranks = _Moves(layout, needs), range(layout.ranks)
    between = [[moves.sent(owner, rank) for owner in ranks] for rank in ranks]
    return [
        Routes(
            send=tuple(_rows(between[other][rank].at, between[other][rank].length) for other in ranks),
            receive=tuple(_rows(pieces.begin, pieces.length) for pieces in between[rank]),
        )
        for rank in ranks
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTables(Generic[Table]):
    """How the keys of one rank are put together, and how their gradients are taken apart: tables of one kind of array.

    Each table has a row for each row that is written: the rows to add up, in this order, with -1 for none. The first
    column are rows of a tensor of this rank, the others rows of what came from other ranks, one rank after the other.

    Attributes:
        sent, received: how many keys go to each rank, and come from it; 0 for the rank itself.
        send: the own rows that are sent, int32 `[sum(sent), 1]`.
        keys: the rows that each key of this rank is taken from, int32 `[keys, 2]`; zeros if there are none.
        send_back: the keys whose gradients are sent back, int32 `[sum(received), 1]`.
        sums: the gradients that are added up for each own row: one of this rank's keys and the parts of other ranks,
            int32 `[local, 1 + parts]`.
        own_run: the first own row and the number of rows, if the keys are consecutive own rows; else None.
        most_received: the number of keys that the rank which receives most of them receives.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    send: Table
    keys: Table
    send_back: Table
    sums: Table
    own_run: Chunk | None
    most_received: int

    def moved(self, move: Callable[[Table], Moved]) -> "KeyTables[Moved]":
        """The same with each table moved, as to a device."""
        return KeyTables(
            sent=self.sent,
            received=self.received,
            send=move(self.send),
            keys=move(self.keys),
            send_back=move(self.send_back),
            sums=move(self.sums),
            own_run=self.own_run,
            most_received=self.most_received,
        )


def key_tables(layout: Layout, needs: KeyNeeds, rank: int) -> KeyTables[Array]:
    """The tables of one rank. Its calls have the keys of its documents, or all keys if the call is not packed."""
    moves, ranks, nothing = _Moves(layout, needs), range(layout.ranks), np.zeros(0, np.int64)
    key_runs = [(0, layout.seq)] if layout.cu_seqlens is None else key_rows(layout, rank).runs
    first_keys, num_keys = _places(key_runs), sum(length for _, length in key_runs)

    def in_keys(begins: Array, lengths: Array) -> Array:
        """Rows of the sequence that are keys of this rank, as numbers of its keys."""
        found = _pieces(begins, begins + lengths, key_runs, first_keys)
        return _rows(found.at, found.length)

    # Every own row is a key: the documents of which a rank has rows are its keys.
    own_keys = in_keys(*np.array(layout.runs(rank), np.int64).reshape(-1, 2).T)
    sent, came = [nothing] * len(ranks), [nothing] * len(ranks)
    for other in ranks:
        if other != rank:
            to, of = moves.sent(rank, other), moves.sent(other, rank)
            sent[other], came[other] = _rows(to.at, to.length), in_keys(of.begin, of.length)
    send_back = np.concatenate(came)
    keys = np.full((num_keys, 2), -1, np.int32)
    keys[own_keys, 0] = np.arange(len(own_keys))
    keys[send_back, 1] = np.arange(len(send_back))
    is_span = num_keys > 0 and keys[0, 0] >= 0 and np.array_equal(keys[:, 0], np.arange(num_keys) + keys[0, 0])
    return KeyTables(
        sent=tuple(map(len, sent)),
        received=tuple(map(len, came)),
        send=np.concatenate(sent).astype(np.int32)[:, None],
        keys=keys,
        send_back=send_back.astype(np.int32)[:, None],
        sums=_sums(layout.local, own_keys, sent),
        own_run=(int(keys[0, 0]), num_keys) if is_span else None,
        most_received=max(
            int(pieces.length[owners != each].sum())
            for each, (pieces, owners) in enumerate(zip(moves.needed, moves.owners, strict=True))
        ),
    )


def _sums(local: int, own_keys: Array, sent: Sequence[Array]) -> Array:
    """`KeyTables.sums` from the keys that the own rows are, and the own rows that are sent to each other rank."""
    number = np.zeros(local, np.int64)  # of parts so far
    for rows in sent:
        number[rows] += 1
    found = np.full((local, 1 + int(number.max(initial=0))), -1, np.int32)
    found[: len(own_keys), 0] = own_keys
    number[:], first = 1, 0
    for rows in sent:
        found[rows, number[rows]] = np.arange(first, first + len(rows))
        number[rows] += 1
        first += len(rows)
    return found
