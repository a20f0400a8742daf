# SPDX-License-Identifier: Apache-2.0
"""How the keys of all ranks are brought to the rows of a rank: what strategies share, and gathered keys."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.parallel.calls import TOKENS
from ...core.parallel.key_needs import planned_needs
from ...core.parallel.shards import Chunk, Layout
from ...core.parallel.work import VariantWork
from .collectives import Exchanges
from .exchange import AllKeys, Keys
from .needed_keys import NeededKeys
from .row_parts import RowPart, dense_parts, document_keys, keyed_parts

Arguments = Callable[[Mapping[str, Tensor]], tuple[Sequence[Tensor], dict[str, Any]]]
"""Makes q, k, v and the keywords of a call of the op from the trained ones of the variant's own tensors."""

Saved = tuple[Tensor, Tensor]
Given = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
"""Gradients of q, k and v, and those of the variant's own tensors by name."""


class Call(Protocol):
    """What a strategy needs of a `rank_call.RankCall`."""

    work: VariantWork
    layout: Layout
    form: str
    packed: bool
    own: dict[str, Any]
    tokens: dict[str, Tensor]
    gives_tokens: tuple[str, ...]
    keywords: dict[str, Any]

    def dims(self, name: str, x: Tensor) -> tuple[str | int, ...]: ...
    def of_heads(self, own: Mapping[str, Any], heads: "OwnHeads", count: int) -> dict[str, Any]: ...
    def numbers(self, values: Any) -> Tensor: ...
    def computed(self, tensors: Sequence[Tensor], keywords: Mapping[str, Any], form: str) -> Saved: ...
    def derived(
        self,
        arguments: Arguments,
        leaves: Mapping[str, Tensor],
        saved: Saved,
        given: Given,
        form: str,
        *,
        wide_dq: bool = False,
    ) -> Gradients: ...


@dataclass(frozen=True)
class OwnHeads:
    """The number of a rank's first key head, counted after each key head is repeated `repeats` times."""

    first: int
    repeats: int

    def further(self, heads: int) -> "OwnHeads":
        """The heads that begin so many heads later."""
        return OwnHeads(self.first + heads, self.repeats)


class RowStrategy(Protocol):
    """o and lse of q's rows `[rows, B, H, D]`, and their gradients."""

    def forward(self) -> Saved:
        """o and lse `[rows, B, H, 1]`."""

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        """The gradients of q, k, v and of the trained ones of the variant's own tensors."""

    def kept(self) -> list[Tensor]:
        """After the forward: what came from other ranks, if the backward may take it from there; else an empty list."""


class OwnSums:
    """Gradients of the variant's own tensors, added up over the calls of a rank in float32."""

    def __init__(self, call: Call, trained: Sequence[str]) -> None:
        self.leaves = {name: call.own[name] for name in trained}
        self.total: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Add the gradients of a call."""
        for name, x in found.items():
            self.total[name] = x.float() + self.total[name] if name in self.total else x.float()


class GatheredRows:
    """The rows of this rank against the keys of all, by groups of key heads."""

    def __init__(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: OwnHeads,
        layout: Layout,
        comm: Exchanges,
        received: Sequence[Tensor] = (),
    ) -> None:
        """received: what `kept` returned in the forward; then no keys are exchanged."""
        self.call, self.q, self.k, self.v, self.heads, self.layout = call, q, k, v, heads, layout
        drops = bool(call.keywords.get("dropout_p"))
        self.parts: Sequence[Any] = dense_parts(layout, comm.rank, drops=drops)
        if call.packed:
            numbered = drops or call.work.by_sequence
            self.parts = keyed_parts(layout, comm.rank, q.device, drops=drops, numbered=numbered)
            self.documents = document_keys(layout, comm.rank, q.device)
        key_heads = k.shape[2]
        groups = layout.head_groups if key_heads % layout.head_groups == 0 else 1
        self.groups = groups if call.work.by_heads else 1
        self.per_group = key_heads // self.groups
        given = {**call.keywords, **call.own, **{name: call.tokens[name] for name in call.gives_tokens}}
        # Values on a device cannot be read while a CUDA graph is captured.
        knows_values = not (q.is_cuda and torch.cuda.is_current_stream_capturing())
        needs = planned_needs(layout, call.work, given, knows_values=knows_values)
        self.exchange: Keys
        if needs is None:
            self.exchange = AllKeys(comm, layout, self.groups, k, v, self.documents.places if call.packed else None)
        else:
            self.exchange = NeededKeys(comm, layout, self.groups, k, v, needs, received)
        self.tokens = dict(call.tokens)
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in self.tokens:
                self.tokens.setdefault(of_keys, self.tokens[of_queries])

    def forward(self) -> Saved:
        call, results = self.call, _Results(len(self.q), self.q.shape[2])
        for group in range(self.groups):
            k, v = self.exchange.keys(group)
            heads = self._query_heads(group)
            own = call.of_heads(call.own, self.heads.further(group * self.per_group), self.per_group)
            for part in self.parts:
                tensors = part.take(self.q.narrow(2, *heads)), part.keys(k), part.keys(v)
                found = call.computed(tensors, self._keywords(own, part), call.form)
                results.add(part, found, heads)
        whole = results.whole((0.0, float("-inf")))
        if whole is None:
            o = self.q.new_zeros(*self.q.shape[:3], self.v.shape[3])
            return o, self.q.new_full((*self.q.shape[:3], 1), float("-inf"), dtype=torch.float32)
        o, lse = whole
        return o, lse

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        call, sums, results = self.call, OwnSums(self.call, trained), _Results(len(self.q), self.q.shape[2])
        for group in range(self.groups):
            k, v = self.exchange.keys(group)
            heads = self._query_heads(group)
            totals: list[Tensor] = []
            for part in self.parts:

                def take(x: Tensor, value: float = 0.0, part: Any = part, heads: tuple[int, int] = heads) -> Tensor:
                    rows: Tensor = part.take(x.narrow(2, *heads), value)
                    return rows

                tensors = take(self.q), part.keys(k), part.keys(v)

                def arguments(
                    own: Mapping[str, Tensor],
                    tensors: Sequence[Tensor] = tensors,
                    part: Any = part,
                    group: int = group,
                ) -> Any:
                    of_group = self.heads.further(group * self.per_group)
                    whole = call.of_heads(call.own | dict(own), of_group, self.per_group)
                    return tensors, self._keywords(whole, part)

                known = take(saved[0]), take(saved[1], float("inf"))
                of_rows = take(given[0]), None if given[1] is None else take(given[1])
                of_q, *of_keys, own = call.derived(arguments, sums.leaves, known, of_rows, call.form)
                results.add(part, (of_q,), heads)
                if totals:
                    for total, change in zip(totals, of_keys, strict=True):
                        part.keys(total).add_(change)
                else:
                    totals = of_keys  # of all keys: the first call has rows of every document
                sums.add(own)
            if not totals:
                totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
            self.exchange.send(group, *totals)
        # Other ranks have terms of the gradient of a repeated key head: only their sum is rounded.
        dk, dv = self.exchange.receive(self.k.dtype if self.heads.repeats == 1 else torch.float32)
        whole = results.whole((0.0,))
        return torch.zeros_like(self.q) if whole is None else whole[0], dk, dv, sums.total

    def kept(self) -> list[Tensor]:
        """What came for each group of heads, if the backward may take it from the forward; else an empty list."""
        return self.exchange.kept()

    def _query_heads(self, group: int) -> tuple[int, int]:
        """First and number of the query heads of a group."""
        count = self.q.shape[2] // self.groups
        return group * count, count

    def _keywords(self, own: Mapping[str, Any], part: Any) -> dict[str, Any]:
        """The keywords of the call that computes the rows of `part` with all keys that are here."""
        call = self.call
        keywords = {**call.keywords, **own}
        if call.packed:
            keywords["cu_seqlens_q"], keywords["cu_seqlens_k"] = part.cu_seqlens, part.cu_seqlens_k
            keywords["q_offset"] = part.q_offset
            for name, x in own.items():
                if isinstance(x, Tensor):
                    keywords[name] = self._own_rows(name, x, part)
            return keywords
        if "q_positions" not in self.tokens:
            keywords["q_offset"] = part.begin
        else:
            # Positions take the place of an offset. A tensor's rows of queries are then those of the call.
            keywords |= {name: self._query_rows(name, x, part) for name, x in own.items() if isinstance(x, Tensor)}
        for name, x in self.tokens.items():
            keywords[name] = x if name.startswith("kv") else x.narrow(1, part.begin, part.length)
        return keywords

    def _query_rows(self, name: str, x: Tensor, part: Any) -> Tensor:
        """One of the variant's own tensors with the rows of queries of a dense call."""
        for axis, dim in enumerate(self.call.dims(name, x)):
            if dim == "q_idx":
                x = x.narrow(axis, part.begin, part.length)
        return x

    def _own_rows(self, name: str, x: Tensor, part: Any) -> Tensor:
        """One of the variant's own tensors, which has the rows of the whole call, with the rows of a packed call."""
        for axis, dim in enumerate(self.call.dims(name, x)):
            if dim == "q_idx":
                x = part.of_sequence(x, axis)
            elif dim == "kv_idx":
                x = part.keys(self.documents.of_sequence(x, axis), axis)
        return x


class _Results:
    """Results of the calls of a rank, put together; those of a single call are not copied."""

    def __init__(self, local: int, heads: int) -> None:
        """local, heads: the rank's rows, and the query heads."""
        self.local, self.heads = local, heads
        self._found: list[tuple[RowPart, Sequence[Tensor], tuple[int, int]]] = []

    def add(self, part: RowPart, found: Sequence[Tensor], heads: tuple[int, int]) -> None:
        """Add the results of a call, `[rows, B, H, ...]` each, for these heads: the first one and their number."""
        self._found.append((part, found, heads))

    def whole(self, empty: Sequence[float]) -> list[Tensor] | None:
        """Each result for all rows and heads; None if there was no call. empty: what rows without a call get."""
        if not self._found:
            return None
        tensors = list(zip(*(found for _, found, _ in self._found), strict=True))
        spans = [part.span for part, _, _ in self._found]
        if all(span == (0, self.local) for span in spans):
            return [x[0] if len(x) == 1 else torch.cat(x, 2) for x in tensors]
        is_all_heads = all(heads == (0, self.heads) for _, _, heads in self._found)
        if is_all_heads and (missing := self._missing(spans)) is not None:
            return [
                torch.cat([*x, x[0].new_full((missing, *x[0].shape[1:]), value)] if missing else x)
                for x, value in zip(tensors, empty, strict=True)
            ]
        return [self._placed(x, value) for x, value in zip(tensors, empty, strict=True)]

    def _missing(self, spans: Sequence[Chunk | None]) -> int | None:
        """The number of the rank's last rows that are in no call, if the calls have all rows before them, in order."""
        end = 0
        for span in spans:
            if span is None or span[0] != end:
                return None
            end += span[1]
        return self.local - end

    def _placed(self, tensors: Sequence[Tensor], value: float) -> Tensor:
        first = tensors[0]
        whole = first.new_full((self.local, first.shape[1], self.heads, *first.shape[3:]), value)
        for (part, _, heads), x in zip(self._found, tensors, strict=True):
            part.put(whole.narrow(2, *heads), x)
        return whole


def starts(runs: Sequence[Chunk]) -> list[int]:
    """Where each run begins among the rows of its rank."""
    found = [0]
    for _, length in runs[:-1]:
        found.append(found[-1] + length)
    return found[: len(runs)]
