# SPDX-License-Identifier: Apache-2.0
"""How rows move between ranks. Each tensor has its rows on axis 0, `[S, ...]`.

Gradients that ranks add up are summed in float32. Every rank runs the same functions in the same order, so that their
collectives meet.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.key_needs import Routes, routes
from ..core.shards import KeyNeeds, Layout
from .collectives import Collectives, Exchanges


def in_order(x: Tensor, layout: Layout) -> Tensor:
    """Rows of all ranks, `[padded, ...]`, as rows of the sequence, `[seq, ...]`."""
    if layout.in_order:
        return x[: layout.seq]
    return x.index_select(0, index(layout, "places", x.device))


def by_rank(x: Tensor, layout: Layout) -> Tensor:
    """The inverse; padding is 0."""
    if layout.in_order:
        return (
            x if layout.padded == layout.seq else torch.cat([x, x.new_zeros(layout.padded - layout.seq, *x.shape[1:])])
        )
    if layout.padded == layout.seq:
        return x.index_select(0, index(layout, "order", x.device))
    found = x.new_zeros(layout.padded, *x.shape[1:])
    return found.index_copy_(0, index(layout, "places", x.device), x)


def index(layout: Layout, name: str, device: torch.device) -> Tensor:
    """`layout.order` or `layout.places` on a device, copied there once for each layout."""
    cache: dict[Any, Tensor] = layout.__dict__.setdefault("_tables", {})
    key = (name, device)
    if key not in cache:
        cache[key] = torch.as_tensor(getattr(layout, name), device=device)
    return cache[key]


def own_rows(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows of one rank, `[local, ...]`, of those of the sequence; padding is 0."""
    parts = [x[begin : begin + length] for begin, length in layout.runs(rank)]
    missing = layout.local - sum(len(part) for part in parts)
    parts += [x.new_zeros(missing, *x.shape[1:])] if missing else []
    return torch.cat(parts)


# --------------------------------------------------------------------------------------------------------------- gather


def split_pair(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """`[rows, features]` as tensors `[rows, *shape]`."""
    parts = x.split([prod(shape) for shape in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


class KeyExchange:
    """Keys and values of all ranks, by groups of key heads, all of which are asked for at once.

    A group's gradients are sent while those of the next are computed.
    """

    def __init__(self, comm: Exchanges, layout: Layout, groups: int, k: Tensor, v: Tensor) -> None:
        """k and v are `[local, B, H, D]`."""
        self.comm, self.layout, self.groups = comm, layout, groups
        self.shapes = [(x.shape[1], x.shape[2] // groups, x.shape[3]) for x in (k, v)]
        self._gradients: list[Tensor | None] = [None] * groups
        pairs = zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)
        self._rows: list[Tensor | None] = [self.ask(torch.cat([a.flatten(1), b.flatten(1)], 1)) for a, b in pairs]

    def keys(self, group: int) -> list[Tensor]:
        """k and v of a group of heads, `[seq, B, H, D]` in order."""
        rows, self._rows[group] = self._rows[group], None
        assert rows is not None
        return split_pair(self.ordered(self.comm.wait(rows)), self.shapes)

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:
        """Start to add up the gradients of a group, float32 `[seq, B, H, D]`."""
        self._gradients[group] = self.give(torch.cat([dk.flatten(1), dv.flatten(1)], 1))

    def receive(self) -> list[Tensor]:
        """The gradients of k and v, float32 `[local, B, H, D]`."""
        parts = [split_pair(self.received(x), self.shapes) for x in self._gradients if x is not None]
        return [torch.cat(each, 2) for each in zip(*parts, strict=True)]

    def ask(self, own: Tensor) -> Tensor:
        """Start to get the rows of all ranks; `own` is `[local, features]`."""
        return self.comm.all_gather(own)

    def ordered(self, rows: Tensor) -> Tensor:
        """What came, in order: `[seq, features]`."""
        return in_order(rows, self.layout)

    def give(self, total: Tensor) -> Tensor:
        """Start to add up gradients `[seq, features]` over the ranks."""
        return self.comm.reduce_scatter(by_rank(total, self.layout))

    def received(self, started: Tensor) -> Tensor:
        """Those of the rows of this rank, `[local, features]`."""
        return self.comm.wait(started)


class NeededKeyExchange(KeyExchange):
    """As `KeyExchange`, but each rank gets only keys that its rows may attend to: others are 0, which the mask drops.

    Gradients go back along the same routes; each rank adds up those of its rows in the order of the ranks.
    """

    def __init__(self, comm: Exchanges, layout: Layout, groups: int, k: Tensor, v: Tensor, needs: KeyNeeds) -> None:
        self.routes, self._send, self._receive = _routes(layout, needs, comm.rank, k.device)
        super().__init__(comm, layout, groups, k, v)

    def ask(self, own: Tensor) -> Tensor:
        rows = own.index_select(0, torch.cat(self._send))
        return self.comm.exchange(rows, self.routes.received, self.routes.sent)

    def ordered(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.layout.seq, rows.shape[1]).index_copy_(0, self._receive, rows)

    def give(self, total: Tensor) -> Tensor:
        return self.comm.exchange(total.index_select(0, self._receive), self.routes.sent, self.routes.received)

    def received(self, started: Tensor) -> Tensor:
        parts = self.comm.wait(started)
        total = parts.new_zeros(self.layout.local, parts.shape[1])
        for rows, part in zip(self._send, parts.split(self.routes.sent), strict=True):
            total.index_add_(0, rows, part)
        return total


def _routes(layout: Layout, needs: KeyNeeds, rank: int, device: torch.device) -> tuple[Routes, list[Tensor], Tensor]:
    """The routes of a rank, and their rows on a device, copied there once for each layout."""
    cache: dict[Any, Any] = layout.__dict__.setdefault("_tables", {})
    key = ("routes", layout.needs.index(needs), rank, device)
    if key not in cache:
        found = routes(layout, needs, rank)
        send = [torch.as_tensor(rows, device=device) for rows in found.send]
        cache[key] = found, send, torch.as_tensor(np.concatenate(found.receive), device=device)
    kept: tuple[Routes, list[Tensor], Tensor] = cache[key]
    return kept


# ----------------------------------------------------------------------------------------------- rows of all ranks


def rows_of_all(comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
    """The rows of all ranks in order, of one tensor: `[local, ...]` to `[seq, ...]`, any dtype."""
    # Some backends gather no booleans.
    wire = x.to(torch.uint8) if x.dtype == torch.bool else x
    return in_order(comm.wait(comm.all_gather(wire.contiguous())), layout).to(x.dtype)


def sum_of_rows(comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
    """What all ranks have for the rows of this one, added up: `[seq, ...]` to `[local, ...]`."""
    return comm.wait(comm.reduce_scatter(by_rank(x, layout)))


class Unsharded(torch.autograd.Function):
    """The rows of all ranks in order; each rank's gradient is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
        ctx.comm, ctx.layout = comm, layout
        found = rows_of_all(comm, layout, x)
        if not x.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, own_rows(gradient, ctx.layout, ctx.comm.rank)


# ---------------------------------------------------------------------------------------------------------------- heads


def to_heads(comm: Exchanges, layout: Layout | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[local, B, H, D]` -> `[seq, B, H / P, D]`, all in one exchange; without a layout the rows of one rank follow
    those of another."""
    size = comm.size
    shapes = [(x.shape[1], x.shape[2] // size, x.shape[3]) for x in tensors]
    parts = [x.unflatten(2, (size, -1)).movedim(2, 0).flatten(2) for x in tensors]
    rows = comm.wait(comm.all_to_all(torch.cat(parts, 2).flatten(0, 1)))
    return split_pair(rows if layout is None else in_order(rows, layout), shapes)


def to_rows(comm: Exchanges, layout: Layout | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inverse; padding is 0."""
    size = comm.size
    rows = torch.cat([x.flatten(1) for x in tensors], 1)
    found = comm.wait(comm.all_to_all(rows if layout is None else by_rank(rows, layout))).unflatten(0, (size, -1))
    parts = found.split([prod(x.shape[1:]) for x in tensors], 2)
    whole = [part.unflatten(2, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]
    return [x.movedim(0, 2).flatten(2, 3) for x in whole]
