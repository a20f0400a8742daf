# SPDX-License-Identifier: Apache-2.0
"""How rows move between ranks. Each tensor has its rows on axis 0, `[S, ...]`.

Gradients that ranks add up are summed in float32. Every rank runs the same functions in the same order, so that their
collectives meet.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.parallel.shards import Layout
from .collectives import Collectives, Exchanges


def in_order(x: Tensor, layout: Layout) -> Tensor:
    """Rows of all ranks, `[padded, ...]`, as rows of the sequence, `[seq, ...]`."""
    if layout.in_order:
        return x[: layout.seq]
    return x.index_select(0, index(layout, "places", x.device))


def by_rank(x: Tensor, layout: Layout) -> Tensor:
    """The inverse of `in_order`; padding is 0."""
    if layout.in_order:
        return (
            x if layout.padded == layout.seq else torch.cat([x, x.new_zeros(layout.padded - layout.seq, *x.shape[1:])])
        )
    if layout.padded == layout.seq:
        return x.index_select(0, index(layout, "order", x.device))
    found = x.new_zeros(layout.padded, *x.shape[1:])
    return found.index_copy_(0, index(layout, "places", x.device), x)


MOST_TABLES = 4096
"""The most tables that are kept of a layout. Before one more is kept all are dropped, and made again when asked for."""


def kept(layout: Layout, key: Any, make: Callable[[], Any]) -> Any:
    """The cached result of `make()` for a layout and a `key`; at most `MOST_TABLES` results are kept of a layout.

    The result is freed with the layout, to which it must not refer: a cycle would hold memory of a device until
    Python's garbage collector runs, which does not consider that memory.
    """
    cache: dict[Any, Any] = layout.__dict__.setdefault("_tables", {})
    if key not in cache:
        # A tensor that is made in inference mode cannot be used where gradients are recorded.
        with torch.inference_mode(False):
            found = make()
        if len(cache) >= MOST_TABLES:
            cache.clear()
        cache[key] = found
        return found
    return cache[key]


def index(layout: Layout, name: str, device: torch.device) -> Tensor:
    """`layout.order` or `layout.places` on a device, copied there once for each layout."""
    found: Tensor = kept(layout, (name, device), lambda: torch.as_tensor(getattr(layout, name), device=device))
    return found


def own_rows(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows of one rank, `[local, ...]`, from the rows of the sequence; padding is 0."""
    parts = [x[begin : begin + length] for begin, length in layout.runs(rank)]
    missing = layout.local - sum(len(part) for part in parts)
    parts += [x.new_zeros(missing, *x.shape[1:])] if missing else []
    return torch.cat(parts)


# --------------------------------------------------------------------------------------------------------------- gather


def split_features(x: Tensor, shapes: Sequence[tuple[int, ...]], axis: int = 1) -> list[Tensor]:
    """Split the last axis of `[..., features]`, which is number `axis`, into tensors `[..., *shape]`."""
    parts = x.split([prod(shape) for shape in shapes], axis)
    return [part.unflatten(axis, shape) for part, shape in zip(parts, shapes, strict=True)]


class Keys(Protocol):
    """Keys and values for the calls of a rank, by groups of key heads. The transfers of all groups start at once.

    The gradients of a group are sent while those of the next group are computed.
    """

    def keys(self, group: int) -> list[Tensor]:
        """k and v of a group of heads, `[keys, B, H, D]`, in the order of the sequence."""

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:
        """Start to add up the gradients of a group, float32 `[keys, B, H, D]`."""

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of k and v `[local, B, H, D]`, added up in float32."""

    def kept(self) -> list[Tensor]:
        """What came for each group, if the backward reuses it; else an empty list."""


class AllKeys:
    """Keys of all ranks, or only of the documents that this rank has rows of."""

    def __init__(
        self, comm: Exchanges, layout: Layout, groups: int, k: Tensor, v: Tensor, places: Tensor | None = None
    ) -> None:
        """k and v are `[local, B, H, D]`. places: indices of those documents' keys among the rows of all ranks."""
        self.comm, self.layout, self.places = comm, layout, places
        self.shapes = [(x.shape[1], x.shape[2] // groups, x.shape[3]) for x in (k, v)]
        self._gradients: list[Tensor | None] = [None] * groups
        pairs = zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)
        self._rows: list[Tensor | None] = [
            comm.all_gather(torch.cat([a.flatten(1), b.flatten(1)], 1)) for a, b in pairs
        ]

    def keys(self, group: int) -> list[Tensor]:
        rows, self._rows[group] = self._rows[group], None
        assert rows is not None
        rows, places = self.comm.wait(rows), self.places
        return split_features(
            in_order(rows, self.layout) if places is None else rows.index_select(0, places), self.shapes
        )

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:
        total, places = torch.cat([dk.flatten(1), dv.flatten(1)], 1), self.places
        if places is None:
            total = by_rank(total, self.layout)
        else:
            total = total.new_zeros(self.layout.padded, total.shape[1]).index_copy_(0, places, total)
        self._gradients[group] = self.comm.reduce_scatter(total)

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        parts = [split_features(self.comm.wait(x), self.shapes) for x in self._gradients if x is not None]
        return [torch.cat(each, 2).to(dtype) for each in zip(*parts, strict=True)]

    def kept(self) -> list[Tensor]:
        return []


# ----------------------------------------------------------------------------------------------- rows of all ranks


def rows_of_all(comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
    """The rows of all ranks in order, of one tensor: `[local, ...]` to `[seq, ...]`, any dtype."""
    # Some backends gather no booleans.
    wire = x.to(torch.uint8) if x.dtype == torch.bool else x
    return in_order(comm.wait(comm.all_gather(wire.contiguous())), layout).to(x.dtype)


def sum_of_rows(comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
    """The rows of this rank in the sum of all ranks' tensors: `[seq, ...]` to `[local, ...]`."""
    return comm.wait(comm.reduce_scatter(by_rank(x, layout)))


class Unsharded(torch.autograd.Function):
    """The rows of all ranks in order; each rank's gradient is that of its own rows."""

    @staticmethod
    def forward(comm: Collectives, layout: Layout, x: Tensor) -> Tensor:
        return rows_of_all(comm, layout, x.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.comm, ctx.layout, _ = inputs
        if not output.is_floating_point():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, own_rows(gradient, ctx.layout, ctx.comm.rank)

    @staticmethod
    def vmap(_info: Any, in_dims: tuple[Any, ...], comm: Collectives, layout: Layout, x: Tensor) -> tuple[Tensor, int]:
        return Unsharded.apply(comm, layout, x.movedim(in_dims[2], -1)), x.dim() - 1


# ---------------------------------------------------------------------------------------------------------------- heads


def to_heads(comm: Exchanges, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[local, B, H, D]` -> `[size * local, B, H / size, D]`, for all tensors in one exchange.

    The rows of each rank follow those of the rank before it.
    """
    size = comm.size
    shapes = [(x.shape[1], x.shape[2] // size, x.shape[3]) for x in tensors]
    parts = [x.unflatten(2, (size, -1)).movedim(2, 0).flatten(2) for x in tensors]
    return split_features(comm.wait(comm.all_to_all(torch.cat(parts, 2).flatten(0, 1))), shapes)


def to_rows(comm: Exchanges, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `to_heads`."""
    rows = torch.cat([x.flatten(1) for x in tensors], 1)
    found = comm.wait(comm.all_to_all(rows)).unflatten(0, (comm.size, -1))
    parts = found.split([prod(x.shape[1:]) for x in tensors], 2)
    whole = [part.unflatten(2, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]
    return [x.movedim(0, 2).flatten(2, 3) for x in whole]
