# SPDX-License-Identifier: Apache-2.0
"""Exchange of keys in which a rank gets from others only the keys that its rows may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.key_needs import NONE, OWN, KeyTables, key_tables
from ..core.shards import Chunk, KeyNeeds, Layout
from ..core.work import Array
from .collectives import Exchanges
from .exchange import kept

MOST_KEPT = 1.5
"""The forward's keys are kept for the backward, in place of a rank's own, if they are at most so many times as many."""

Rows: TypeAlias = Tensor | Chunk
"""Some rows of a tensor: their indices, or for adjacent rows the first one and how many there are."""


class NeededKeys:
    """Keys of the documents that a rank has rows of, or of all rows.

    From other ranks it gets only the keys that its rows may attend to. Keys that it does not get are 0: the mask drops
    them. Gradients are sent back along the same routes. Each rank adds the gradients that it receives to its own, in
    the order of the ranks.
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
        """k and v are `[local, B, H, D]`. If `received` is given, which `kept` returned, only their shapes are read."""
        self.comm, self.local = comm, layout.local

        def make() -> _Tables:
            return _Tables.of(key_tables(layout, needs, comm.rank), comm, k.device)

        key = ("key tables", layout.needs.index(needs), comm.rank, k.device)
        self.tables: _Tables = kept(layout, key, make)
        self._pairs = list(zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True))
        self._coming = [
            None if received else self._exchanged(*pair, self.tables.send, back=False) for pair in self._pairs
        ]
        self._keys: list[Tensor] = list(received)
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._returning: list[Tensor | None] = []

    def keys(self, group: int) -> list[Tensor]:
        if len(self._keys) <= 2 * group:
            pair = self._pairs[group]
            came = self._came(self._coming[group], pair, back=False)
            self._keys += [_together(x, part, self.tables) for x, part in zip(pair, came, strict=True)]
        return self._keys[2 * group : 2 * group + 2]

    def kept(self) -> list[Tensor]:
        # Either all ranks keep their keys or none does, so that their backwards run the same exchanges.
        return self._keys if self.tables.most <= MOST_KEPT * self.local else []

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002  # groups are sent in order
        self._gradients.append((dk, dv))
        self._returning.append(self._exchanged(dk, dv, self.tables.receive, back=True))

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        tables, found = self.tables, []
        for pair, coming in zip(self._gradients, self._returning, strict=True):
            own = [_own_part(x, tables, self.local, dtype) for x in pair]
            for mine, x, came in zip(own, pair, self._came(coming, pair, back=True), strict=True):
                if came is None or tables.shared is None:
                    continue
                total = _rows_of(x, tables.shared_keys)
                for rows, part in zip(tables.parts, came.split(tables.sent), strict=True):
                    if isinstance(rows, tuple):
                        total.narrow(0, *rows).add_(part)
                    else:
                        total.index_add_(0, rows, part)
                if isinstance(tables.shared, tuple):
                    mine.narrow(0, *tables.shared).copy_(total)
                else:
                    mine.index_copy_(0, tables.shared, total.to(dtype))
            found.append(own)
        return [each[0] if len(each) == 1 else torch.cat(each, 2) for each in zip(*found, strict=True)]

    def _exchanged(self, k: Tensor, v: Tensor, rows: Sequence[Rows], *, back: bool) -> Tensor | None:
        """Start to send rows of two tensors to each other rank; None if no rank sends any."""
        tables, width = self.tables, _width(k) + _width(v)
        if not tables.sends:
            return None
        parts = [_rows_of(x, each).flatten() for each in rows for x in (k, v)]
        sent, received = (tables.received, tables.sent) if back else (tables.sent, tables.received)
        lengths = [[n * width for n in tables.with_own(each)] for each in (received, sent)]
        return self.comm.exchange(torch.cat(parts), *lengths)

    def _came(self, coming: Tensor | None, like: Sequence[Tensor], *, back: bool) -> list[Tensor | None]:
        """The rows that came from the other ranks, rank by rank, for either tensor; None if nothing was sent."""
        counts = self.tables.sent if back else self.tables.received
        if coming is None:
            return [None, None]
        widths = [_width(x) for x in like]
        parts = self.comm.wait(coming).split([n * width for n in counts for width in widths])
        found: list[Tensor | None] = []
        for i, x in enumerate(like):
            flat = parts[i] if len(counts) == 1 else torch.cat(parts[i::2])
            found.append(flat.view(-1, *x.shape[1:]))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tables:
    """`KeyTables` on a device. sent, received: how many rows go to each other rank, and come from it."""

    rank: int
    most: int
    pieces: Sequence[tuple[int, int, int]]
    sends: bool
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
            first = int(rows[0]) if len(rows) else 0
            follow = bool((rows == range(first, first + len(rows))).all())
            return (first, len(rows)) if follow else torch.as_tensor(rows, device=device)

        return cls(
            rank=comm.rank,
            most=found.most,
            pieces=found.pieces,
            sends=found.sends,
            send=tuple(map(there, found.send)),
            receive=tuple(map(there, found.receive)),
            sent=list(map(len, found.send)),
            received=list(map(len, found.receive)),
            shared=there(found.shared) if len(found.shared) else None,
            shared_keys=there(found.shared_keys),
            parts=tuple(map(there, found.parts)),
        )

    def with_own(self, counts: Sequence[int]) -> list[int]:
        """Counts of the other ranks, and 0 for this one."""
        return [*counts[: self.rank], 0, *counts[self.rank :]]


def _width(x: Tensor) -> int:
    """Elements of a row."""
    return prod(x.shape[1:])


def _rows_of(x: Tensor, rows: Rows) -> Tensor:
    """Rows of a tensor, as a view if they are adjacent."""
    return x.narrow(0, *rows) if isinstance(rows, tuple) else x.index_select(0, rows)


def _together(own: Tensor, came: Tensor | None, tables: _Tables) -> Tensor:
    """Keys in the order of the sequence: this rank's own, those that came, and 0 for the others."""
    longest = max((n for source, _, n in tables.pieces if source == NONE), default=0)
    sources = (own, own[:0] if came is None else came, own.new_zeros(longest, *own.shape[1:]))
    parts = [sources[source].narrow(0, 0 if source == NONE else at, n) for source, at, n in tables.pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else own[:0]


def _own_part(total: Tensor, tables: _Tables, local: int, dtype: torch.dtype) -> Tensor:
    """The gradients of this rank's rows, from those of all keys that it computed with; padding is 0."""
    moves, at = [], 0
    for source, first, n in tables.pieces:
        moves += [(at, first, n)] if source == OWN else []
        at += n
    is_whole = sum(n for *_, n in moves) == local
    found = (torch.empty if is_whole else torch.zeros)((local, *total.shape[1:]), dtype=dtype, device=total.device)
    for at, first, n in moves:
        found.narrow(0, first, n).copy_(total.narrow(0, at, n))
    return found
