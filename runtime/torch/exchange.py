"""Autograd functions that move rows between ranks. Each tensor has its rows on axis 0, `[S, ...]`.

Gradients that ranks add up are summed in float32. Every rank runs the same functions in the same order, so that their
collectives meet in the backward as they did in the forward.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.key_needs import Routes, routes
from ..core.shards import KeyNeeds, Layout
from .collectives import Collectives


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

    A group's gradients are sent while those of the next are computed. Between ranks and autograd stand tokens, empty
    tensors: what was started may not be read before it is waited for, and autograd would cast it.
    """

    def __init__(self, comm: Collectives, layout: Layout, groups: int, k: Tensor, v: Tensor) -> None:
        """k and v are `[local, B, H, D]`."""
        self.comm, self.layout, self.groups, self.dtype = comm, layout, groups, k.dtype
        self.shapes = [(x.shape[1], x.shape[2] // groups, x.shape[3]) for x in (k, v)]
        self._rows: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = [None] * groups
        self.tokens: tuple[Tensor, ...] = StartKeys.apply(self, k, v)

    def start(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Ask for the rows of every group."""
        for a, b in zip(k.chunk(self.groups, 2), v.chunk(self.groups, 2), strict=True):
            self._rows.append(self.comm.all_gather(torch.cat([a.flatten(1), b.flatten(1)], 1)))
        return tuple(k.new_empty(0) for _ in range(self.groups))

    def keys(self, group: int, uses: int) -> tuple[Tensor, ...]:
        """k and v of a group of heads, `[seq, B, H, D]` in order, once for each use."""
        found: tuple[Tensor, ...] = Keys.apply(self, group, uses, self.tokens[group])
        return found

    def take(self, group: int) -> Tensor:
        """The rows of a group, in order: `[seq, features]`."""
        rows, self._rows[group] = self._rows[group], None
        assert rows is not None
        return in_order(self.comm.wait(rows), self.layout)

    def send(self, group: int, total: Tensor) -> None:
        """Start to add up the gradients of a group, float32 `[seq, features]`."""
        self._gradients[group] = self.comm.reduce_scatter(by_rank(total, self.layout))

    def received(self, started: Tensor) -> Tensor:
        """The gradients of a group for the rows of this rank, float32 `[local, features]`."""
        return self.comm.wait(started)

    def receive(self) -> list[Tensor]:
        """The gradients of k and v, `[local, B, H, D]`."""
        parts = []
        for group, started in enumerate(self._gradients):
            assert started is not None
            parts.append(split_pair(self.received(started).to(self.dtype), self.shapes))
            self._gradients[group] = None
        return [torch.cat(each, 2) for each in zip(*parts, strict=True)]


class NeededKeyExchange(KeyExchange):
    """Keys and values that the rows of each rank may attend to. Those of other rows are 0, and the mask drops them.

    Gradients go back along the same routes; each rank adds up those of its rows in the order of the ranks.
    """

    def __init__(self, comm: Collectives, layout: Layout, groups: int, k: Tensor, v: Tensor, needs: KeyNeeds) -> None:
        self.routes, self._send, self._receive = _routes(layout, needs, comm.rank, k.device)
        super().__init__(comm, layout, groups, k, v)

    def start(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rows = torch.cat(self._send)
        for a, b in zip(k.chunk(self.groups, 2), v.chunk(self.groups, 2), strict=True):
            own = torch.cat([a.flatten(1), b.flatten(1)], 1).index_select(0, rows)
            self._rows.append(self.comm.exchange(own, self.routes.received, self.routes.sent))
        return tuple(k.new_empty(0) for _ in range(self.groups))

    def take(self, group: int) -> Tensor:
        rows, self._rows[group] = self._rows[group], None
        assert rows is not None
        received = self.comm.wait(rows)
        return received.new_zeros(self.layout.seq, received.shape[1]).index_copy_(0, self._receive, received)

    def send(self, group: int, total: Tensor) -> None:
        rows = total.index_select(0, self._receive)
        self._gradients[group] = self.comm.exchange(rows, self.routes.sent, self.routes.received)

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


class StartKeys(torch.autograd.Function):
    """Starts an exchange of keys; in the backward ends that of their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: KeyExchange, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.start(k, v)

    @staticmethod
    def backward(ctx: Any, *_tokens: Tensor) -> tuple[Any, ...]:
        return None, *ctx.exchange.receive()


class Keys(torch.autograd.Function):
    """The keys and values of a group; the gradients of all uses are added up in float32."""

    @staticmethod
    def forward(ctx: Any, exchange: KeyExchange, group: int, uses: int, _token: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group, ctx.device = exchange, group, _token.device
        ctx.set_materialize_grads(False)
        parts = split_pair(exchange.take(group), exchange.shapes)
        return tuple(part.view(part.shape) for _ in range(uses) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        exchange: KeyExchange = ctx.exchange
        features = sum(map(prod, exchange.shapes))
        total = torch.zeros(exchange.layout.seq, features, dtype=torch.float32, device=ctx.device)
        parts = split_pair(total, exchange.shapes)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                parts[i % len(parts)].add_(gradient)
        exchange.send(ctx.group, total)
        return None, None, None, total.new_zeros(0, dtype=exchange.dtype)


class Rows(torch.autograd.Function):
    """The rows of all ranks in order, of one tensor: `[local, ...]` to `[seq, ...]`, any dtype."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
        ctx.comm, ctx.layout, ctx.dtype = comm, layout, x.dtype
        # Some backends gather no booleans.
        wire = x.to(torch.uint8) if x.dtype == torch.bool else x
        found = in_order(comm.wait(comm.all_gather(wire.contiguous())), layout).to(x.dtype)
        if not x.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        comm, layout = ctx.comm, ctx.layout
        return None, None, comm.wait(comm.reduce_scatter(by_rank(gradient.float(), layout))).to(ctx.dtype)


class Whole(torch.autograd.Function):
    """A tensor that every rank has whole; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, x: Tensor) -> Tensor:
        ctx.comm = comm
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.comm.wait(ctx.comm.all_reduce(gradient.float())).to(gradient.dtype)


class Tie(torch.autograd.Function):
    """`x`, which the others do not enter: they get a gradient of 0, so that a rank without rows has a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)


# ---------------------------------------------------------------------------------------------------------------- heads


def _to_heads(comm: Collectives, layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[local, B, H, D]` -> `[seq, B, H / P, D]`, all in one exchange."""
    size = comm.size
    shapes = [(x.shape[1], x.shape[2] // size, x.shape[3]) for x in tensors]
    parts = [x.unflatten(2, (size, -1)).movedim(2, 0).flatten(2) for x in tensors]
    rows = comm.wait(comm.all_to_all(torch.cat(parts, 2).flatten(0, 1)))
    return split_pair(in_order(rows, layout), shapes)


def _to_rows(comm: Collectives, layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inverse; padding is 0."""
    size = comm.size
    rows = by_rank(torch.cat([x.flatten(1) for x in tensors], 1), layout)
    found = comm.wait(comm.all_to_all(rows)).unflatten(0, (size, -1))
    parts = found.split([prod(x.shape[1:]) for x in tensors], 2)
    whole = [part.unflatten(2, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]
    return [x.movedim(0, 2).flatten(2, 3) for x in whole]


class ToHeads(torch.autograd.Function):
    """Rows of all heads to heads of all rows."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.layout = comm, layout
        return tuple(_to_heads(comm, layout, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_to_rows(ctx.comm, ctx.layout, gradients)


class ToRows(torch.autograd.Function):
    """Heads of all rows to rows of all heads."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.layout = comm, layout
        return tuple(_to_rows(comm, layout, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_to_heads(ctx.comm, ctx.layout, gradients)


class Unsharded(torch.autograd.Function):
    """The rows of all ranks in order; each rank's gradient is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
        ctx.comm, ctx.layout = comm, layout
        found: Tensor = Rows.forward(_NoContext(), comm, layout, x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, own_rows(gradient, ctx.layout, ctx.comm.rank)


class _NoContext:
    """A context that nothing reads."""

    def mark_non_differentiable(self, *_: Tensor) -> None:
        """Unsharded integers have no gradient anyway."""
