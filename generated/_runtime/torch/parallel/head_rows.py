# SPDX-License-Identifier: Apache-2.0
"""Ranks that each compute some heads of all rows: exchanges turn rows of all heads into heads of all rows, and back.

Each tensor is copied once on each side of its exchange, or not at all if its memory already has the order of the
exchange. What a rank received in the forward may be kept for the backward (DeepSpeed-Ulysses, arXiv:2309.14509), which
then does not exchange q, k, v and o again.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.parallel.costs import repeats_of_keys
from .collectives import Exchanges
from .exchange import by_rank, in_order, split_features
from .row_strategies import Call, OwnHeads, OwnSums

Started: TypeAlias = tuple[Tensor, list[tuple[int, ...]]]
"""An exchange that was started, and the shape of a row of each tensor that it brings."""

_WORD = torch.int64
"""Tensors are copied as elements of this dtype if possible, because they are fewer than elements of 16 bits."""


class HeadRows:
    """A call in which each rank computes its own heads, in groups: one group is exchanged while another is computed."""

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
        """Write to o, and to lse if it is wanted, `[local, B, H, ...]`, the results for q, k and v `[local, B, H, D]`.

        Returns what the backward needs of each group: q, k, v, o and lse of all rows.
        """
        call, kept, results = self.call, [], []
        coming = self._to_heads(q, *self._repeated(k, v))
        for group, received in enumerate(coming):
            tensors = self._received(received)
            of_q, of_k, of_v = tensors
            of_lse: Tensor
            of_o, of_lse = call.computed(tensors, self._keywords(call.own, group), call.form)
            kept += [of_q, of_k, of_v, of_o, of_lse]
            results.append((self._send_rows(of_o), None if lse is None else self._send_rows(of_lse)))
        for group, (sent_o, sent_lse) in enumerate(results):
            self._write(o, sent_o, group)
            if lse is not None:
                assert sent_lse is not None
                self._write(lse, sent_lse, group)
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
        call, sums, sent = self.call, OwnSums(self.call, trained), []
        coming = self._to_heads(do), self._to_heads(dlse) if dlse is not None else None
        for group in range(self.groups):
            q, k, v, o, lse = kept[5 * group : 5 * group + 5]
            (of_do,), of_dlse = self._received(coming[0][group]), None
            if coming[1] is not None:
                (of_dlse,) = self._received(coming[1][group])

            def arguments(own: Mapping[str, Tensor], tensors: Sequence[Tensor] = (q, k, v), group: int = group) -> Any:
                return tensors, self._keywords(call.own | dict(own), group)

            dq, dk, dv, own = call.derived(arguments, sums.leaves, (o, lse), (of_do, of_dlse), call.form)
            # The terms of a sum are not rounded: gradients of repeated key heads are sent in float32.
            wire = dq.dtype if self.repeats == 1 else torch.float32
            sent.append((self._send_rows(dq), self._send_rows(dk, dv, dtype=wire)))
            sums.add(own)
        for group, (sent_q, sent_keys) in enumerate(sent):
            self._write(outputs[0], sent_q, group)
            self._write_keys(outputs[1:], sent_keys, group)
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

    def _to_heads(self, *tensors: Tensor) -> list[list[Started]]:
        """Start to exchange tensors `[local, B, H, D]`, group by group: the first alone, the others together."""
        started = []
        for group in range(self.groups):
            of_group = []
            for together in (tensors[:1], tensors[1:]):
                if not together:
                    continue
                parts = [self._parts(x, group) for x in together]
                buffer = _side_by_side(parts, 2)
                shapes = [tuple(part.shape[2:]) for part in parts]
                of_group.append((self.comm.all_to_all(buffer.flatten(0, 1)), shapes))
            started.append(of_group)
        return started

    def _parts(self, x: Tensor, group: int) -> Tensor:
        """Heads of a group by the rank that computes them: `[ranks, local, B, h, D]`, a view."""
        parts: Tensor = x.unflatten(2, (self.comm.size, self.groups, -1))[:, :, :, group].movedim(2, 0)
        return parts

    def _received(self, started: Sequence[Started]) -> list[Tensor]:
        """Heads of all rows, `[seq, B, h, D]`."""
        found = []
        for x, shapes in started:
            found += split_features(in_order(self.comm.wait(x), self.layout), shapes)
        return found

    # ------------------------------------------------------------------------------------------------ heads to rows

    def _send_rows(self, *tensors: Tensor, dtype: torch.dtype | None = None) -> Started:
        """Start to send each row of tensors `[seq, B, h, D]` to the rank that has this row."""
        shapes = [tuple(x.shape[1:]) for x in tensors]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            rows = tensors[0].flatten(1)
        else:
            rows = _side_by_side(tensors, 1, dtype)
        return self.comm.all_to_all(by_rank(rows, self.layout)), shapes

    def _rows(self, started: Started) -> list[Tensor]:
        """The tensors that were received, each `[ranks, local, B, h, D]`."""
        x, shapes = started
        return split_features(self.comm.wait(x).unflatten(0, (self.comm.size, -1)), shapes, axis=2)

    def _write(self, output: Tensor, started: Started, group: int) -> None:
        (part,) = self._rows(started)
        _copy(self._parts(output, group), part)

    def _write_keys(self, outputs: Sequence[Tensor], started: Started, group: int) -> None:
        for output, part in zip(outputs, self._rows(started), strict=True):
            if self.repeats == 1:
                _copy(self._parts(output, group), part)
                continue
            # With repeated heads there is one group, and the copies of a head are adjacent.
            sums = part.movedim(0, 2).flatten(2, 3).unflatten(2, (-1, self.repeats)).sum(3)
            output.copy_(sums)


def _side_by_side(tensors: Sequence[Tensor], axis: int, dtype: torch.dtype | None = None) -> Tensor:
    """The tensors, with their dims from `axis` on flattened, concatenated along `axis`."""
    first, widths = tensors[0], [prod(x.shape[axis:]) for x in tensors]
    found = first.new_empty((*first.shape[:axis], sum(widths)), dtype=dtype or first.dtype)
    for x, part in zip(tensors, found.split(widths, axis), strict=True):
        _copy(part.unflatten(axis, x.shape[axis:]), x)
    return found


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor, as words of 8 bytes if the layouts of both tensors allow that."""
    if target.dtype == source.dtype and _has_words(target) and _has_words(source):
        target, source = target.view(_WORD), source.view(_WORD)
    target.copy_(source)


def _has_words(x: Tensor) -> bool:
    count = _WORD.itemsize // x.element_size()
    if x.dim() == 0 or x.stride(-1) != 1 or x.shape[-1] % count or x.storage_offset() % count:
        return False
    return all(stride % count == 0 for stride in x.stride()[:-1])
