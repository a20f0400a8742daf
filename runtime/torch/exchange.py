"""How rows move between ranks. Each tensor has its rows on axis 0, `[S, ...]`.

Gradients that ranks add up are summed in float32. Every rank runs the same functions in the same order, so that their
collectives meet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.key_needs import NONE, OWN, KeyTables, key_tables
from ..core.packed_rows import key_rows
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


def kept(layout: Layout, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` returned when a layout was first asked for `key`."""
    cache: dict[Any, Any] = layout.__dict__.setdefault("_tables", {})
    if key not in cache:
        cache[key] = make()
    return cache[key]


def index(layout: Layout, name: str, device: torch.device) -> Tensor:
    """`layout.order` or `layout.places` on a device, copied there once for each layout."""
    found: Tensor = kept(layout, (name, device), lambda: torch.as_tensor(getattr(layout, name), device=device))
    return found


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


class Keys(Protocol):
    """Keys and values for the calls of a rank, by groups of key heads, all of which are asked for at once.

    A group's gradients are sent while those of the next are computed.
    """

    def keys(self, group: int) -> list[Tensor]:
        """k and v of a group of heads, `[keys, B, H, D]` in order."""

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:
        """Start to add up the gradients of a group, float32 `[keys, B, H, D]`."""

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of k and v `[local, B, H, D]`, added up in float32."""


class AllKeys:
    """Keys of all ranks, or of those documents that a rank has rows of."""

    def __init__(self, comm: Exchanges, layout: Layout, groups: int, k: Tensor, v: Tensor) -> None:
        """k and v are `[local, B, H, D]`."""
        self.comm, self.layout = comm, layout
        self.shapes = [(x.shape[1], x.shape[2] // groups, x.shape[3]) for x in (k, v)]
        self._gradients: list[Tensor | None] = [None] * groups
        pairs = zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)
        self._rows: list[Tensor | None] = [
            comm.all_gather(torch.cat([a.flatten(1), b.flatten(1)], 1)) for a, b in pairs
        ]

    def keys(self, group: int) -> list[Tensor]:
        rows, self._rows[group] = self._rows[group], None
        assert rows is not None
        rows, places = self.comm.wait(rows), self._places(rows.device)
        return split_pair(in_order(rows, self.layout) if places is None else rows.index_select(0, places), self.shapes)

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:
        total, places = torch.cat([dk.flatten(1), dv.flatten(1)], 1), self._places(dk.device)
        if places is None:
            total = by_rank(total, self.layout)
        else:
            total = total.new_zeros(self.layout.padded, total.shape[1]).index_copy_(0, places, total)
        self._gradients[group] = self.comm.reduce_scatter(total)

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        parts = [split_pair(self.comm.wait(x), self.shapes) for x in self._gradients if x is not None]
        return [torch.cat(each, 2).to(dtype) for each in zip(*parts, strict=True)]

    def _places(self, device: torch.device) -> Tensor | None:
        """Where the keys of packed documents are among the rows of all ranks; None if all are here."""
        layout, rank = self.layout, self.comm.rank
        if layout.cu_seqlens is None:
            return None

        def make() -> Tensor | None:
            rows = key_rows(layout, rank)
            if rows.count == layout.seq:
                return None
            return torch.as_tensor(layout.places[rows.rows], device=device)

        places: Tensor | None = kept(layout, ("key places", rank, device), make)
        return places


class NeededKeys:
    """Keys of the documents that a rank has rows of, or of all rows. Of other ranks it gets only those that its rows
    may attend to: others are 0, which the mask drops.

    Gradients go back along the same routes; each rank adds to its own those of the others, in the order of the ranks.
    """

    def __init__(self, comm: Exchanges, layout: Layout, groups: int, k: Tensor, v: Tensor, needs: KeyNeeds) -> None:
        """k and v are `[local, B, H, D]`."""
        self.comm, self.local, self.pairs = (
            comm,
            layout.local,
            list(zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)),
        )
        key = ("key tables", layout.needs.index(needs), comm.rank, k.device)
        self.tables: _Tables = kept(
            layout, key, lambda: _Tables.of(key_tables(layout, needs, comm.rank), comm, k.device)
        )
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._coming = [self._exchanged(*pair, self.tables.send, back=False) for pair in self.pairs]
        self._returning: list[Tensor | None] = []

    def keys(self, group: int) -> list[Tensor]:
        return [
            _together(x, came, self.tables)
            for x, came in zip(
                self.pairs[group], self._came(self._coming[group], self.pairs[group], back=False), strict=True
            )
        ]

    def send(self, group: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002  # groups are sent in order
        self._gradients.append((dk, dv))
        self._returning.append(self._exchanged(dk, dv, self.tables.receive, back=True))

    def receive(self, dtype: torch.dtype) -> list[Tensor]:
        tables, found = self.tables, []
        for (dk, dv), coming in zip(self._gradients, self._returning, strict=True):
            pair = [_own_part(x, tables, self.local, dtype) for x in (dk, dv)]
            for own, x, came in zip(pair, (dk, dv), self._came(coming, (dk, dv), back=True), strict=True):
                if came is None or tables.shared is None:
                    continue
                total = x.index_select(0, tables.shared_keys)
                for rows, part in zip(tables.parts, came.split(tables.sent), strict=True):
                    total.index_add_(0, rows, part)
                own.index_copy_(0, tables.shared, total.to(dtype))
            found.append(pair)
        return [each[0] if len(each) == 1 else torch.cat(each, 2) for each in zip(*found, strict=True)]

    def _exchanged(self, k: Tensor, v: Tensor, rows: Sequence[Tensor], *, back: bool) -> Tensor | None:
        """Start to send rows of two tensors to each other rank; None if no rank sends any."""
        tables, width = self.tables, _width(k) + _width(v)
        if not tables.sends:
            return None
        parts = [x.index_select(0, of_rank).flatten() for of_rank in rows if len(of_rank) for x in (k, v)]
        sent, received = (tables.received, tables.sent) if back else (tables.sent, tables.received)
        lengths = [[n * width for n in tables.with_own(each)] for each in (received, sent)]
        return self.comm.exchange(torch.cat(parts) if parts else k.new_empty(0), *lengths)

    def _came(self, coming: Tensor | None, like: Sequence[Tensor], *, back: bool) -> list[Tensor | None]:
        """What came from the other ranks, one after the other, of either tensor; None if nothing did."""
        counts = self.tables.sent if back else self.tables.received
        if coming is None:
            return [None, None]
        widths = [_width(x) for x in like]
        parts = self.comm.wait(coming).split([n * width for n in counts for width in widths])
        found = []
        for i, x in enumerate(like):
            flat = parts[i] if len(counts) == 1 else torch.cat(parts[i::2])
            found.append(flat.view(-1, *x.shape[1:]))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tables:
    """`KeyTables` on a device. sent, received: how many rows go to each other rank, and come from it."""

    rank: int
    pieces: Sequence[tuple[int, int, int]]
    sends: bool
    send: Sequence[Tensor]
    receive: Sequence[Tensor]
    sent: list[int]
    received: list[int]
    shared: Tensor | None
    shared_keys: Tensor
    parts: Sequence[Tensor]

    @classmethod
    def of(cls, found: KeyTables, comm: Exchanges, device: torch.device) -> "_Tables":
        def there(rows: Any) -> Tensor:
            return torch.as_tensor(rows, device=device)

        return cls(
            rank=comm.rank,
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


def _together(own: Tensor, came: Tensor | None, tables: _Tables) -> Tensor:
    """Keys in order, of this rank's rows and of those that came."""
    longest = max((n for source, _, n in tables.pieces if source == NONE), default=0)
    sources = (own, own[:0] if came is None else came, own.new_zeros(longest, *own.shape[1:]))
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


def to_heads(comm: Exchanges, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[local, B, H, D]` -> `[size * local, B, H / size, D]`, all in one exchange: the rows of one rank follow those of
    another."""
    size = comm.size
    shapes = [(x.shape[1], x.shape[2] // size, x.shape[3]) for x in tensors]
    parts = [x.unflatten(2, (size, -1)).movedim(2, 0).flatten(2) for x in tensors]
    return split_pair(comm.wait(comm.all_to_all(torch.cat(parts, 2).flatten(0, 1))), shapes)


def to_rows(comm: Exchanges, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inverse."""
    rows = torch.cat([x.flatten(1) for x in tensors], 1)
    found = comm.wait(comm.all_to_all(rows)).unflatten(0, (comm.size, -1))
    parts = found.split([prod(x.shape[1:]) for x in tensors], 2)
    whole = [part.unflatten(2, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]
    return [x.movedim(0, 2).flatten(2, 3) for x in whole]
