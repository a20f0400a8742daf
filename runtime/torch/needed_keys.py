"""Keys of other ranks that the rows of a rank may attend to: they alone are sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..core.key_needs import NONE, OWN, KeyTables, key_tables, runs_of
from ..core.shards import Chunk, KeyNeeds, Layout
from ..core.work import Array
from .collectives import Exchanges
from .exchange import kept
from .peers import PeerCollectives

T = TypeVar("T")

MOST_KEPT = 1.5
"""The forward's keys are kept for the backward if they are at most so many times a rank's own, in place of these."""

MOST_RUNS = 8
"""Rows in so many runs at most are views of these; those in more are copied by their numbers."""

Rows: TypeAlias = Tensor | tuple[Chunk, ...]
"""Some rows of a tensor: their numbers, or runs of them, each its first row and how many there are."""

Coming: TypeAlias = Callable[[], list[Tensor]]
"""Waits for an exchange, and returns what it brings."""


class NeededKeys:
    """Keys of the documents that a rank has rows of, or of all rows. Of other ranks it gets only those that its rows
    may attend to: others are 0, which the mask drops.

    Gradients go back along the same routes; each rank adds to its own those of the others, in the order of the ranks.
    """

    def __init__(
        self,
        comm: Exchanges,
        layout: Layout,
        groups: int,
        k: Tensor,
        v: Tensor,
        needs: KeyNeeds,
        received: Sequence[Tensor] = (),
    ) -> None:
        """k and v are `[local, B, H, D]`; of these only shapes are read if `received` is what `kept` returned."""
        self.comm, self.local = comm, layout.local

        def make() -> _Tables:
            return _Tables.of(key_tables(layout, needs, comm.rank), comm, k.device)

        key = ("key tables", layout.needs.index(needs), comm.rank, k.device)
        self.tables: _Tables = kept(layout, key, make)
        self._keys: list[Tensor] = list(received)
        self._coming: list[Coming] = []
        if not received:
            self._coming = [self._asked(pair) for pair in zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)]
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._returning: list[Coming] = []

    def keys(self, group: int) -> list[Tensor]:
        if len(self._keys) <= 2 * group:
            self._keys += self._coming[group]()
        return self._keys[2 * group : 2 * group + 2]

    def kept(self) -> list[Tensor]:
        # All ranks keep theirs or none does: their backwards exchange the same.
        return self._keys if self.tables.most <= MOST_KEPT * self.local else []

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002  # groups are sent in order
        self._gradients.append((dk, dv))
        self._returning.append(self._exchanged((dk, dv), self.tables.receive, back=True))

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        tables, found = self.tables, []
        for pair, coming in zip(self._gradients, self._returning, strict=True):
            own = [_own_part(x, tables, self.local, dtype) for x in pair]
            for mine, x, came in zip(own, pair, coming() if tables.shared is not None else (), strict=False):
                assert tables.shared is not None
                total = _rows_of(x, tables.shared_keys)
                for rows, part in zip(tables.parts, came.split(tables.sent), strict=True):
                    _add_rows(total, rows, part)
                _put_rows(mine, tables.shared, total)
            found.append(own)
        return [each[0] if len(each) == 1 else torch.cat(each, 2) for each in zip(*found, strict=True)]

    def _asked(self, pair: Sequence[Tensor]) -> Coming:
        """Start to get the keys of a group: k and v in order."""
        tables = self.tables
        if tables.most_sent and all(isinstance(rows, tuple) for rows in tables.receive):
            # Keys come straight to their places.
            found = [_with_own(x, tables) for x in pair]
            places = tables.with_own(tables.receive, ())
            targets = [[part for x in found for part in _parts_of(x, rows)] for rows in places]
            wait = self._delivered(pair, tables.send, targets)
            if wait is not None:
                return partial(_behind, wait, found)
        coming = self._exchanged(pair, tables.send, back=False)
        return lambda: [_together(x, part, tables) for x, part in zip(pair, coming(), strict=True)]

    def _exchanged(self, pair: Sequence[Tensor], rows: Sequence[Rows], *, back: bool) -> Coming:
        """Start to send rows of two tensors to each other rank: what came from these, one after the other, of either
        tensor. Nothing comes where no rank sends any."""
        tables = self.tables
        if tables.most_sent == 0:
            return lambda: [x[:0] for x in pair]
        to_get, to_send = (tables.sent, tables.received) if back else (tables.received, tables.sent)
        found = [x.new_empty((sum(to_get), *x.shape[1:])) for x in pair]
        targets: list[Sequence[Tensor]] = list(zip(*(x.split(tables.with_own(to_get, 0)) for x in found), strict=True))
        targets[tables.rank] = ()
        wait = self._delivered(pair, rows, targets)
        if wait is not None:
            return partial(_behind, wait, found)
        widths = [prod(x.shape[1:]) for x in pair]
        width = sum(widths)
        parts = [_rows_of(x, each).flatten() for each in rows for x in pair]
        lengths, of_sent = ([n * width for n in tables.with_own(each, 0)] for each in (to_get, to_send))
        coming = self.comm.exchange(torch.cat(parts), lengths, of_sent, tables.most_sent * width)

        def came() -> list[Tensor]:
            parts = self.comm.wait(coming).split([n * width for n in to_get for width in widths])
            return [torch.cat(parts[i::2]).view(x.shape) for i, x in enumerate(found)]

        return came

    def _delivered(
        self, pair: Sequence[Tensor], rows: Sequence[Rows], targets: Sequence[Sequence[Tensor]]
    ) -> Callable[[], None] | None:
        """Start to copy rows to targets of the other ranks; returns what waits for the targets of this one, or None if
        rows must go through the process group."""
        if not isinstance(self.comm, PeerCollectives):
            return None
        sent = self.tables.with_own([[part for x in pair for part in _parts_of(x, each)] for each in rows], [])
        event = self.comm.deliver(sent, targets, self.tables.most_sent * _width(pair), pair[0])
        return None if event is None else event.wait


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tables:
    """`KeyTables` on a device. sent, received: how many rows go to each other rank, and come from it."""

    rank: int
    most: int
    pieces: Sequence[tuple[int, int, int]]
    most_sent: int
    send: Sequence[Rows]
    receive: Sequence[Rows]
    sent: list[int]
    received: list[int]
    shared: Rows | None
    shared_keys: Rows
    parts: Sequence[Rows]

    @classmethod
    def of(cls, found: KeyTables, comm: Exchanges, device: torch.device) -> "_Tables":
        def there(rows: Array) -> Rows:
            runs = runs_of(rows)
            return runs if len(runs) <= MOST_RUNS else torch.as_tensor(rows, device=device)

        return cls(
            rank=comm.rank,
            most=found.most,
            pieces=found.pieces,
            most_sent=found.most_sent,
            send=tuple(map(there, found.send)),
            receive=tuple(map(there, found.receive)),
            sent=list(map(len, found.send)),
            received=list(map(len, found.receive)),
            shared=there(found.shared) if len(found.shared) else None,
            shared_keys=there(found.shared_keys),
            parts=tuple(map(there, found.parts)),
        )

    def with_own(self, of_others: Sequence[T], own: T) -> list[T]:
        """What there is of each other rank, and of this one."""
        return [*of_others[: self.rank], own, *of_others[self.rank :]]


def _behind(wait: Callable[[], None], found: list[Tensor]) -> list[Tensor]:
    wait()
    return found


def _width(pair: Sequence[Tensor]) -> int:
    """Bytes of a row of tensors."""
    return sum(prod(x.shape[1:]) * x.element_size() for x in pair)


def _parts_of(x: Tensor, rows: Rows) -> list[Tensor]:
    """Rows of a tensor, run by run."""
    return [x.index_select(0, rows)] if isinstance(rows, Tensor) else [x.narrow(0, *run) for run in rows]


def _rows_of(x: Tensor, rows: Rows) -> Tensor:
    """The same in one tensor, a view of one run."""
    parts = _parts_of(x, rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x[:0]


def _add_rows(x: Tensor, rows: Rows, change: Tensor) -> None:
    """Add to rows of a tensor."""
    if isinstance(rows, Tensor):
        x.index_add_(0, rows, change)
        return
    for part, of_part in zip(_parts_of(x, rows), change.split([n for _, n in rows]), strict=True):
        part.add_(of_part)


def _put_rows(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Write rows of a tensor."""
    if isinstance(rows, Tensor):
        x.index_copy_(0, rows, values.to(x.dtype))
        return
    for part, of_part in zip(_parts_of(x, rows), values.split([n for _, n in rows]), strict=True):
        part.copy_(of_part)


def _with_own(own: Tensor, tables: _Tables) -> Tensor:
    """Keys in order, of which those of other ranks are still to come."""
    found, at = own.new_empty((sum(n for *_, n in tables.pieces), *own.shape[1:])), 0
    for source, first, n in tables.pieces:
        if source == OWN:
            found.narrow(0, at, n).copy_(own.narrow(0, first, n))
        elif source == NONE:
            found.narrow(0, at, n).zero_()
        at += n
    return found


def _together(own: Tensor, came: Tensor, tables: _Tables) -> Tensor:
    """Keys in order, of this rank's rows and of those that came."""
    longest = max((n for source, _, n in tables.pieces if source == NONE), default=0)
    sources = (own, came, own.new_zeros(longest, *own.shape[1:]))
    parts = [sources[source].narrow(0, 0 if source == NONE else at, n) for source, at, n in tables.pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else own[:0]


def _own_part(total: Tensor, tables: _Tables, local: int, dtype: torch.dtype) -> Tensor:
    """The gradients of this rank's rows, of those of its keys; padding is 0."""
    moves, at = [], 0
    for source, first, n in tables.pieces:
        moves += [(at, first, n)] if source == OWN else []
        at += n
    is_whole = sum(n for *_, n in moves) == local
    found = (torch.empty if is_whole else torch.zeros)((local, *total.shape[1:]), dtype=dtype, device=total.device)
    for at, first, n in moves:
        found.narrow(0, first, n).copy_(total.narrow(0, at, n))
    return found
