# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute some heads of all rows each: rows of all heads become heads of all rows, and back.

Each tensor is copied once on each side of its exchange, and not at all where it lies as it is sent. What a rank
received in the forward may be kept for the backward (DeepSpeed-Ulysses, arXiv:2309.14509), which then sends no q, k, v
and o.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.costs import repeats_of_keys
from .collectives import Exchanges
from .exchange import by_rank, in_order, split_features
from .peers import PeerCollectives
from .row_strategies import Call, OwnHeads, OwnSums
from .words import copy_words

Coming: TypeAlias = Callable[[], list[Tensor]]
"""Waits for an exchange, and returns what it brings: `[ranks * local, B, h, D]` each."""


class HeadRows:
    """A call whose rank computes heads of its own, in groups: a group is exchanged while another is computed."""

    def __init__(self, call: Call, comm: Exchanges, heads: tuple[int, int]) -> None:
        """heads: query heads and key heads of the whole call."""
        self.call, self.comm, self.layout = call, comm, call.layout
        self.repeats = repeats_of_keys(heads, comm.size)
        self.per_rank = heads[1] * self.repeats // comm.size
        divides = self.repeats == 1 and self.per_rank % self.layout.head_groups == 0
        self.groups = self.layout.head_groups if divides else 1
        self.per_group = self.per_rank // self.groups
        self.local = self.layout.local

    # -------------------------------------------------------------------------------------------------- the two passes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None) -> list[Tensor]:
        """Write o, and lse if it is wanted, `[local, B, H, ...]`, of q, k and v `[local, B, H, D]`. Returns what the
        backward needs of each group: q, k, v, o and lse of all rows."""
        call, kept = self.call, list[Tensor]()
        results: list[Callable[[], None]] = []
        coming = self._to_heads(q, *self._repeated(k, v))
        for group, received in enumerate(coming):
            tensors = self._received(received)
            of_q, of_k, of_v = tensors
            of_lse: Tensor
            of_o, of_lse = call.computed(tensors, self._keywords(call.own, group), call.form)
            kept += [of_q, of_k, of_v, of_o, of_lse]
            results.append(self._send_rows([of_o], [o], group))
            if lse is not None:
                results.append(self._send_rows([of_lse], [lse], group))
        for finish in results:
            finish()
        return kept

    def backward(
        self,
        kept: Sequence[Tensor],
        do: Tensor,
        dlse: Tensor | None,
        outputs: Sequence[Tensor],
        trained: Sequence[str],
    ) -> dict[str, Tensor]:
        """Write the gradients of q, k and v, `[local, B, H, D]`, to `outputs`; returns those of the variant's own
        tensors. kept: as `forward` returned it. do, dlse: of this rank's rows and all heads."""
        call, sums = self.call, OwnSums(self.call, trained)
        results: list[Callable[[], None]] = []
        coming = self._to_heads(do), self._to_heads(dlse) if dlse is not None else None
        for group in range(self.groups):
            q, k, v, o, lse = kept[5 * group : 5 * group + 5]
            (of_do,), of_dlse = self._received(coming[0][group]), None
            if coming[1] is not None:
                (of_dlse,) = self._received(coming[1][group])

            def arguments(own: Mapping[str, Tensor], tensors: Sequence[Tensor] = (q, k, v), group: int = group) -> Any:
                return tensors, self._keywords(call.own | dict(own), group)

            dq, dk, dv, own = call.derived(arguments, sums.leaves, (o, lse), (of_do, of_dlse), call.form)
            results.append(self._send_rows([dq], outputs[:1], group))
            results.append(self._send_rows([dk, dv], outputs[1:], group, repeats=self.repeats))
            sums.add(own)
        for finish in results:
            finish()
        return sums.total

    def exchanged(self, *tensors: Tensor) -> list[Tensor]:
        """q, k, v, o and lse of all rows of each group, from those of this rank's rows, as `forward` returns them."""
        q, k, v, o, lse = tensors
        coming = self._to_heads(q, *self._repeated(k, v)), self._to_heads(o), self._to_heads(lse)
        return [x for group in range(self.groups) for each in coming for x in self._received(each[group])]

    def _keywords(self, own: Mapping[str, Any], group: int) -> dict[str, Any]:
        call = self.call
        heads = OwnHeads(self.comm.rank * self.per_rank, self.repeats).further(group * self.per_group)
        keywords = {**call.keywords, **call.of_heads(own, heads, self.per_group), **call.tokens}
        if call.packed:
            keywords["cu_seqlens_q"] = call.numbers(self.layout.cu_seqlens)
        return keywords

    # ------------------------------------------------------------------------------------------------ rows to heads

    def _repeated(self, *keys: Tensor) -> list[Tensor]:
        return [x if self.repeats == 1 else x.repeat_interleave(self.repeats, 2) for x in keys]

    def _to_heads(self, *tensors: Tensor) -> list[list[Coming]]:
        """Start to exchange tensors `[local, B, H, D]`, those behind the first together, group by group."""
        return [
            [
                self._exchanged([self._parts(x, group) for x in together])
                for together in (tensors[:1], tensors[1:])
                if together
            ]
            for group in range(self.groups)
        ]

    def _exchanged(self, parts: Sequence[Tensor]) -> Coming:
        """Start to exchange tensors `[ranks, local, B, h, D]`."""
        found = [part.new_empty(part.shape) for part in parts]
        wait = self._delivered(parts, found)
        if wait is not None:
            return lambda: [x.flatten(0, 1) for x in wait()]
        buffer = _side_by_side(parts, 2)
        shapes = [tuple(part.shape[2:]) for part in parts]
        coming = self.comm.all_to_all(buffer.flatten(0, 1))
        return lambda: split_features(self.comm.wait(coming), shapes)

    def _delivered(self, parts: Sequence[Tensor], targets: Sequence[Tensor]) -> Coming | None:
        """Start to copy part `[rank]` of each tensor to that rank's targets `[ranks, ...]`, whose parts are contiguous;
        None if they must go through the process group."""
        if not isinstance(self.comm, PeerCollectives):
            return None
        sent, received = (list(zip(*(x.unbind(0) for x in each), strict=True)) for each in (parts, targets))
        event = self.comm.deliver(sent, received, sum(x[0].nbytes for x in targets), targets[0])
        if event is None:
            return None

        def wait() -> list[Tensor]:
            event.wait()
            return list(targets)

        return wait

    def _parts(self, x: Tensor, group: int) -> Tensor:
        """Heads of a group by the rank that computes them: `[ranks, local, B, h, D]`, a view."""
        parts: Tensor = x.unflatten(2, (self.comm.size, self.groups, -1))[:, :, :, group].movedim(2, 0)
        return parts

    def _received(self, started: Sequence[Coming]) -> list[Tensor]:
        """Heads of all rows, `[seq, B, h, D]`."""
        return [in_order(x, self.layout) for coming in started for x in coming()]

    # ------------------------------------------------------------------------------------------------ heads to rows

    def _send_rows(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], group: int, repeats: int = 1
    ) -> Callable[[], None]:
        """Start to send all rows of tensors `[seq, B, h, D]` to the ranks that have them.

        Returns what waits for the rows of this rank and writes them to the outputs `[local, B, H, D]`; repeated heads
        are added up.
        """
        if repeats == 1:
            targets = [self._parts(x, group) for x in outputs]
            finish = self._delivered_rows(tensors, targets)
            if finish is not None:
                return finish
        # Parts of a sum are not rounded: those of repeated key heads are sent in float32.
        wire, shapes = outputs[0].dtype if repeats == 1 else torch.float32, [tuple(x.shape[1:]) for x in tensors]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            rows = tensors[0].flatten(1)
        else:
            rows = _side_by_side(tensors, 1, wire)
        coming = self.comm.all_to_all(by_rank(rows, self.layout))

        def write() -> None:
            whole = self.comm.wait(coming).unflatten(0, (self.comm.size, -1))
            for output, part in zip(outputs, split_features(whole, shapes, axis=2), strict=True):
                if repeats == 1:
                    copy_words(self._parts(output, group), part)
                else:
                    # There is one group; repeated heads follow each other.
                    output.copy_(part.movedim(0, 2).flatten(2, 3).unflatten(2, (-1, repeats)).sum(3))

        return write

    def _delivered_rows(self, tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> Callable[[], None] | None:
        """The same through the memory of peers, to targets `[ranks, local, B, h, D]`; None if that is not possible."""
        if not isinstance(self.comm, PeerCollectives):
            return None
        parts = [by_rank(x, self.layout).unflatten(0, (self.comm.size, -1)) for x in tensors]
        orders = [_memory_order(x[0]) for x in targets]
        if all(order is not None for order in orders):
            # Each part is copied to its place at once, as it lies there.
            views = [[x.permute(order) for x, order in zip(each, orders, strict=True)] for each in (parts, targets)]
            arrived = self._delivered(*views)
            return None if arrived is None else partial(_ignore, arrived)
        found = [x.new_empty(x.shape) for x in targets]
        wait = self._delivered(parts, found)
        if wait is None:
            return None

        def write() -> None:
            for target, part in zip(targets, wait(), strict=True):
                copy_words(target, part)

        return write


def _ignore(coming: Coming) -> None:
    """Wait for an exchange whose targets are where they are wanted."""
    coming()


def _memory_order(part: Tensor) -> tuple[int, ...] | None:
    """The axes, in the order in which they lie in memory, of a tensor whose part `[0]` this is; None if such parts are
    not contiguous."""
    by_stride = sorted(range(part.dim()), key=part.stride().__getitem__, reverse=True)
    # An axis of one element has any stride.
    order = sorted(by_stride, key=lambda axis: part.shape[axis] != 1)
    return (0, *(axis + 1 for axis in order)) if part.permute(order).is_contiguous() else None


def _side_by_side(tensors: Sequence[Tensor], axis: int, dtype: torch.dtype | None = None) -> Tensor:
    """Tensors whose dims from `axis` on are flattened, one beside the other along that axis."""
    first, widths = tensors[0], [prod(x.shape[axis:]) for x in tensors]
    found = first.new_empty((*first.shape[:axis], sum(widths)), dtype=dtype or first.dtype)
    for x, part in zip(tensors, found.split(widths, axis), strict=True):
        copy_words(part.unflatten(axis, x.shape[axis:]), x)
    return found
