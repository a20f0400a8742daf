# SPDX-License-Identifier: Apache-2.0
"""One call over several ranks, as one of them computes it: its forward, and its backward from o and lse.

Rows are on axis 0, `[rows, B, H, D]`. `_Split` gives each of the ranks that share rows its own heads. A strategy, such
as `GatheredRows`, brings keys to the rows of a rank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ...core.checks import PACKED
from ...core.parallel.calls import TOKENS, form_of, local_axes, own_dims
from ...core.parallel.costs import repeats_of_keys
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork
from ..plain import recording_gradients
from .collectives import Collectives, Exchanges, GridCollectives
from .exchange import index, kept, rows_of_all, sum_of_rows, to_heads, to_rows
from .head_rows import HeadRows
from .ring import RingRows
from .row_strategies import GatheredRows, OwnHeads, RowStrategy

LAYOUT = "bhsd"
"""The default layout of q, k and v."""


class RankCall:
    """A call on one rank.

    Attributes:
        q, k, v: the rows of this rank. own: the variant's own tensors, whole. tokens: ids and positions of all rows,
            `[B, seq]`. keywords: the other arguments of the op.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        work: VariantWork,
        layout: Layout,
        comm: Collectives,
        given: Mapping[str, Any],
        *,
        sums_gradients: bool,
    ) -> None:
        self.op, self.work, self.layout, self.comm, self.sums_gradients = op, work, layout, comm, sums_gradients
        keywords = {name: x for name, x in given.items() if x is not None and name not in ("return_lse", "q_offset")}
        self.form = form_of(layout, keywords, LAYOUT)
        self.packed = self.form == PACKED
        self.device = keywords["q"].device
        self.q, self.k, self.v = (rows_first(keywords.pop(name), self.form) for name in ("q", "k", "v"))
        self.tokens = {
            name: rows_of_all(comm, layout, keywords.pop(name).t().contiguous()).t()
            for name in TOKENS
            if name in keywords
        }
        self.gives_tokens = tuple(self.tokens)
        if layout.segment_ids is not None and "q_segment_ids" not in self.tokens:
            ids = index(layout, "segment_ids", self.device).to(torch.int32)
            self.tokens["q_segment_ids"] = ids.expand(self.q.shape[1], -1)
        self.given_own = {name: keywords.pop(name) for name in work.tensors if name in keywords}
        self.own = {name: self._whole(name, x) for name, x in self.given_own.items()}
        self.keywords = keywords

    # -------------------------------------------------------------------------------------------------- the two passes

    def forward(self, *, wants_lse: bool = True) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """o and lse of the rows of this rank, in the form of the call; lse may be None if it is not wanted.

        The third result are tensors that the backward may take in place of q, k, v, o and lse, or an empty list.
        """
        if self.layout.strategy == "heads":
            return self._forward_by_heads(wants_lse=wants_lse)
        split = _Split.of(self)
        q, k, v = split.to_heads(self.q, self.k, self.v)
        rows = self._rows(split, q, k, v)
        o, lse = self._finished(*split.to_rows(*rows.forward()))
        came = rows.kept() if split.comm is None else []
        known = [self.q, self.k, self.v, rows_first(o, self.form), lse_first(lse, self.packed)]
        return o, lse, [*known, *came] if came else []

    def backward(
        self,
        saved: tuple[Tensor, Tensor] | None,
        given: tuple[Tensor, Tensor | None],
        wanted: Sequence[str],
        kept: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """The gradients of `wanted`, by name: of q, k, v and the variant's own tensors, as these were given.

        Args:
            saved: o and lse, or None. given: the gradients with respect to them.
            kept: the third result of the forward, if `saved` is None. Then no values of q, k and v are read.
        """
        trained = [name for name in self.own if name in wanted]
        do, dlse = rows_first(given[0], self.form), None if given[1] is None else lse_first(given[1], self.packed)
        if self.layout.strategy == "heads":
            return self._backward_by_heads(saved, (do, dlse), wanted, kept)
        split = _Split.of(self)
        if saved is None:
            q, k, v, o, lse, *came = kept
            rows, of_lse = self._rows(split, q, k, v, came), [] if dlse is None else [dlse]
        else:
            o, lse = rows_first(saved[0], self.form), lse_first(saved[1], self.packed)
            sums = [lse, *([] if dlse is None else [dlse])]
            q, k, v, o, do, lse, *of_lse = split.to_heads(self.q, self.k, self.v, o, do, *sums)
            rows = self._rows(split, q, k, v)
        dq, dk, dv, own = rows.backward((o, lse), (do, of_lse[0] if of_lse else None), trained)
        dq, dk, dv = split.gradients(dq, dk, dv)
        pairs = zip(("q", "k", "v"), (dq, dk, dv), (self.q, self.k, self.v), strict=True)
        found = {name: in_form(x.to(like.dtype), self.form) for name, x, like in pairs if name in wanted}
        return found | {name: self._own_gradient(name, own.get(name)) for name in trained}

    def _by_heads(self) -> HeadRows:
        return HeadRows(self, cast("Exchanges", self.comm), (self.q.shape[2], self.k.shape[2]))

    def _forward_by_heads(self, *, wants_lse: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        q, form = self.q, self.form
        o = empty_in_form((*q.shape[:3], self.v.shape[3]), form, q)
        sizes = (q.shape[2], len(q)) if self.packed else (q.shape[1], q.shape[2], len(q))
        lse = torch.empty(sizes, dtype=torch.float32, device=q.device) if wants_lse else None
        kept = self._by_heads().forward(
            q, self.k, self.v, rows_first(o, form), None if lse is None else lse_first(lse, self.packed)
        )
        rows = sum(length for _, length in self.layout.runs(self.comm.rank))
        if lse is not None and rows < self.layout.local:
            lse[..., rows:] = float("-inf")
        return o, lse, kept

    def _backward_by_heads(
        self,
        saved: tuple[Tensor, Tensor] | None,
        given: tuple[Tensor, Tensor | None],
        wanted: Sequence[str],
        kept: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        rows, tensors = self._by_heads(), (self.q, self.k, self.v)
        if saved is not None:
            kept = rows.exchanged(*tensors, rows_first(saved[0], self.form), lse_first(saved[1], self.packed))
        outputs = [empty_in_form(x.shape, self.form, x) for x in tensors]
        trained = [name for name in self.own if name in wanted]
        own = rows.backward(kept, *given, [rows_first(x, self.form) for x in outputs], trained)
        found = {name: x for name, x in zip(("q", "k", "v"), outputs, strict=True) if name in wanted}
        return found | {name: self._own_gradient(name, own.get(name)) for name in trained}

    def _rows(self, split: "_Split", q: Tensor, k: Tensor, v: Tensor, received: Sequence[Tensor] = ()) -> RowStrategy:
        layout, heads = self.layout, OwnHeads(split.first, split.repeats)
        rows = layout.nodes or layout
        if rows.strategy == "ring":
            return RingRows(self, q, k, v, heads, rows, split.outer)
        return GatheredRows(self, q, k, v, heads, rows, split.outer, received)

    def _finished(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """o and lse in the form of the call; in rows of padding o is 0 and lse is -inf."""
        rows = sum(length for _, length in self.layout.runs(self.comm.rank))
        if rows < self.layout.local:
            missing = self.layout.local - rows
            o = torch.cat([o[:rows], o.new_zeros(missing, *o.shape[1:])])
            lse = torch.cat([lse[:rows], lse.new_full((missing, *lse.shape[1:]), float("-inf"))])
        return in_form(o, self.form).contiguous(), lse_in_form(lse, self.packed).contiguous()

    # ------------------------------------------------------------------------------------------------- the own tensors

    def _whole(self, name: str, x: Any) -> Any:
        """One of the variant's own tensors, with the rows of all ranks."""
        if not isinstance(x, Tensor) or self.layout.ranks == 1:
            return x
        for axis in local_axes(self.work, self.layout, name, x.shape):
            x = rows_of_all(self.comm, self.layout, x.movedim(axis, 0)).movedim(0, axis)
        return x

    def _own_gradient(self, name: str, total: Tensor | None) -> Tensor:
        """The gradient of one of the variant's own tensors, as it was given; `total` is the part of this rank."""
        given, whole = self.given_own[name], self.own[name]
        total = whole.new_zeros(whole.shape, dtype=torch.float32) if total is None else total.float()
        if self.layout.ranks > 1:
            local = local_axes(self.work, self.layout, name, given.shape)
            for axis in reversed(local):
                total = sum_of_rows(self.comm, self.layout, total.movedim(axis, 0).contiguous()).movedim(0, axis)
            if not local and self.sums_gradients:
                total = self.comm.wait(self.comm.all_reduce(total))
        return total.to(given.dtype).contiguous()

    def dims(self, name: str, x: Tensor) -> tuple[str | int, ...]:
        """The dims of one of the variant's own tensors, as the call has it."""
        return own_dims(self.work, self.layout, name, x.dim())

    def of_heads(self, own: Mapping[str, Any], heads: "OwnHeads", count: int) -> dict[str, Any]:
        """The variant's own tensors for `count` key heads, from number `heads.first` of the repeated key heads on.

        If the call has dropout, `dropout_origin` is added, which says where these heads are in the whole call.
        """
        query_heads, key_heads = self.q.shape[2], self.k.shape[2] * heads.repeats
        group = query_heads // key_heads
        found: dict[str, Any] = {}
        if self.keywords.get("dropout_p"):
            batch_row, head, all_heads = self.keywords.get("dropout_origin", (0, 0, query_heads))
            found["dropout_origin"] = batch_row, head + heads.first * group, all_heads
        for name, x in own.items():
            if isinstance(x, Tensor) and count < key_heads:
                for axis, dim in enumerate(self.dims(name, x)):
                    if dim == "h" and x.shape[axis] == query_heads:
                        x = x.narrow(axis, heads.first * group, count * group)
                    elif dim == "hkv" and x.shape[axis] == key_heads // heads.repeats:
                        x = x.repeat_interleave(heads.repeats, axis).narrow(axis, heads.first, count)
            found[name] = x
        return found

    # --------------------------------------------------------------------------------------------------------- the op

    def numbers(self, values: Any) -> Tensor:
        """Integers of a layout as an int32 tensor on the device of this call, copied there once."""
        found: Tensor = kept(
            self.layout,
            (tuple(values), self.device),
            lambda: torch.tensor(tuple(values), dtype=torch.int32, device=self.device),
        )
        return found

    def computed(self, tensors: Sequence[Tensor], keywords: Mapping[str, Any], form: str) -> tuple[Tensor, Tensor]:
        """o and lse of the op for q, k and v `[rows, B, H, D]`; the rows of o and lse are on axis 0, too."""
        o, lse = self.op(*(in_form(x, form) for x in tensors), **keywords, return_lse=True)
        return rows_first(o, form), lse_first(lse, form == PACKED)

    def derived(
        self,
        arguments: Callable[..., tuple[Sequence[Tensor], dict[str, Any]]],
        leaves: Mapping[str, Tensor],
        saved: tuple[Tensor, Tensor],
        given: tuple[Tensor, Tensor | None],
        form: str,
        *,
        wide_dq: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """The gradients of a call of the op: of q, of k and v in float32, and of `leaves` by name.

        Args:
            arguments: makes q, k, v and the keywords of the call, among them the variant's own tensors from `leaves`.
            saved: o and lse of the rows, over all their keys. given: the gradients with respect to them.
        """
        packed = form == PACKED
        with recording_gradients() if leaves else nullcontext():
            fresh = {name: x.detach().requires_grad_() for name, x in leaves.items()}
            tensors, keywords = arguments(fresh)
        read = {name: keywords[name] for name in fresh if keywords[name].requires_grad}
        keywords = {name: x.detach() if isinstance(x, Tensor) else x for name, x in keywords.items()}
        (o, lse), (do, dlse) = saved, given
        found = self.op.backward(  # type: ignore[attr-defined]  # which every op has
            in_form(do, form),
            *(in_form(x, form) for x in tensors),
            in_form(o, form),
            lse_in_form(lse, packed).contiguous(),
            dlse=None if dlse is None else lse_in_form(dlse, packed).contiguous(),
            wanted=tuple(read),
            wide_dq=wide_dq,
            **keywords,
        )
        own: dict[str, Tensor] = {}
        if read:
            with recording_gradients():
                changes = torch.autograd.grad(
                    list(read.values()), [fresh[name] for name in read], [found.own[name] for name in read]
                )
            own = dict(zip(read, changes, strict=True))
        dq, dk, dv = (rows_first(x, form) for x in found[:3])
        return dq, dk, dv, own


class _Split:
    """Ranks that share rows, each of which computes its own heads; a single rank if heads are not split.

    Attributes:
        comm: collectives among them; None for a single rank. outer: collectives among the ranks with the same heads.
        first: the number of this rank's first key head, counted after each key head is repeated `repeats` times.
    """

    def __init__(self, comm: Exchanges | None, outer: Exchanges, key_heads: int, repeats: int):
        self.comm, self.outer, self.repeats = comm, outer, repeats
        self.first = 0 if comm is None else comm.rank * (key_heads * repeats // comm.size)

    @classmethod
    def of(cls, call: RankCall) -> "_Split":
        heads = call.q.shape[2], call.k.shape[2]
        if call.layout.nodes is not None:
            assert isinstance(call.comm, GridCollectives)
            inner, outer = call.comm.inner, call.comm.outer
            return cls(inner, outer, heads[1], repeats_of_keys(heads, inner.size))
        ranks = cast("Exchanges", call.comm)
        return cls(None, ranks, heads[1], 1)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
        """Exchange rows of all heads for heads of all rows, for each of these tensors."""
        if self.comm is None:
            return [q, k, v, *others]
        k, v = (x if self.repeats == 1 else x.repeat_interleave(self.repeats, 2) for x in (k, v))
        wide = [x for x in (q, k, v, *others) if x.dtype == q.dtype]
        narrow = [x for x in others if x.dtype != q.dtype]
        found = to_heads(self.comm, wide)
        return found + (to_heads(self.comm, narrow) if narrow else [])

    def to_rows(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `to_heads`, for o and lse."""
        if self.comm is None:
            return o, lse
        return to_rows(self.comm, [o])[0], to_rows(self.comm, [lse])[0]

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """The gradients of q, k and v for the rows of this rank; those of a repeated key head are added up."""
        if self.comm is None:
            return [dq, dk, dv]
        if self.repeats == 1:
            return to_rows(self.comm, [dq, dk.to(dq.dtype), dv.to(dq.dtype)])
        # The terms of a sum are not rounded: they are sent in float32.
        (dq,), parts = to_rows(self.comm, [dq]), to_rows(self.comm, [dk, dv])
        return [dq, *(x.unflatten(2, (-1, self.repeats)).sum(3) for x in parts)]


# ------------------------------------------------------------------------------------------------- tensors, rows first


def rows_first(x: Tensor, form: str) -> Tensor:
    """q, k, v or o as `[rows, B, H, D]`, a view."""
    if form == PACKED:
        return x.unsqueeze(1)
    return x.permute(2, 0, 1, 3) if form == "bhsd" else x.transpose(0, 1)


def in_form(x: Tensor, form: str) -> Tensor:
    """The inverse of `rows_first`."""
    if form == PACKED:
        return x.squeeze(1)
    return x.permute(1, 2, 0, 3) if form == "bhsd" else x.transpose(0, 1)


def empty_in_form(size: Sequence[int], form: str, like: Tensor) -> Tensor:
    """A new tensor of rows `[rows, B, H, D]`, contiguous in its form."""
    rows, batch, heads, columns = size
    sizes = {
        PACKED: (rows, heads, columns),
        "bhsd": (batch, heads, rows, columns),
        "bshd": (batch, rows, heads, columns),
    }
    return torch.empty(sizes[form], dtype=like.dtype, device=like.device)


def lse_first(x: Tensor, packed: bool) -> Tensor:
    """lse as `[rows, B, H, 1]`, a view."""
    return x.t()[:, None, :, None] if packed else x.permute(2, 0, 1).unsqueeze(3)


def lse_in_form(x: Tensor, packed: bool) -> Tensor:
    """The inverse of `lse_first`."""
    return x[:, 0, :, 0].t() if packed else x.squeeze(3).permute(1, 2, 0)
