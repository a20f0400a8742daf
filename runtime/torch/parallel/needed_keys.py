"""Exchange of keys in which a rank gets from others only the keys that its rows may attend to."""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from ...core.parallel.key_routes import KeyTables, key_tables
from ...core.parallel.shards import KeyNeeds, Layout
from .collectives import Exchanges
from .exchange import kept
from .row_sums import packed_gradients, packed_keys, summed_gradients, unpacked_keys

MOST_KEPT = 0.5
"""What came in the forward is kept for the backward if it is at most so many times as many keys as a rank has."""


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
        """k and v are `[local, B, H, D]`. received: what `kept` returned in the forward; then nothing is exchanged."""
        self.comm, self.local = comm, layout.local

        def make() -> KeyTables[Tensor]:
            return key_tables(layout, needs, comm.rank).moved(partial(torch.as_tensor, device=k.device))

        key = ("key tables", layout.needs.index(needs), comm.rank, k.device)
        self.tables: KeyTables[Tensor] = kept(layout, key, make)
        self._pairs = list(zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True))
        self._came, self._arrived = list(received), len(received)
        if not received and self.tables.most_received:
            for pair in self._pairs:
                rows = packed_keys(*pair, self.tables.send) if len(self.tables.send) else _no_rows(*pair)
                self._came.append(comm.exchange(rows, self.tables.received, self.tables.sent))
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._returning: list[Tensor] = []

    def keys(self, group: int) -> list[Tensor]:
        (k, v), tables = self._pairs[group], self.tables
        if self._came and group >= self._arrived:
            self._came[group] = self.comm.wait(self._came[group])
            self._arrived += 1
        if tables.own_run is not None:
            return [x.narrow(0, *tables.own_run) for x in (k, v)]
        if not len(tables.keys):
            return [k[:0], v[:0]]
        return list(unpacked_keys(k, v, _part(self._came, group), tables.keys, _name(k.dtype)))

    def kept(self) -> list[Tensor]:
        # Either all ranks keep what came or none does, so that their backwards run the same exchanges.
        return self._came if self.tables.most_received <= MOST_KEPT * self.local else []

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002  # groups are sent in order
        self._gradients.append((dk, dv))
        if self.tables.most_received:
            send = self.tables.send_back
            rows = packed_gradients(dk, dv, send) if len(send) else _no_rows(dk, dv)
            self._returning.append(self.comm.exchange(rows, self.tables.sent, self.tables.received))

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        self._returning = [self.comm.wait(x) for x in self._returning]
        found = [
            summed_gradients(*pair, _part(self._returning, group), self.tables.sums, _name(dtype))
            for group, pair in enumerate(self._gradients)
        ]
        return [each[0] if len(each) == 1 else torch.cat(each, 2) for each in zip(*found, strict=True)]


def _part(came: Sequence[Tensor], group: int) -> Tensor | None:
    """What came of a group of heads; None if this rank received nothing."""
    return came[group] if came and came[group].numel() else None


def _no_rows(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty((0, prod(k.shape[1:]) + prod(v.shape[1:])))


def _name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in `torch.NAME`: a call that is replayed takes no dtype."""
    return str(dtype).removeprefix("torch.")
