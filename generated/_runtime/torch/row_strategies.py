# SPDX-License-Identifier: Apache-2.0
"""How the rows of a rank meet the keys of all: on one rank for some heads, or gathered there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.key_needs import planned_needs
from ..core.parallel_calls import TOKENS
from ..core.shards import Chunk, Layout, rows_ahead, sequences_of
from ..core.work import VariantWork
from .collectives import Exchanges
from .exchange import KeyExchange, NeededKeyExchange

Arguments = Callable[[Mapping[str, Tensor]], tuple[Sequence[Tensor], dict[str, Any]]]
"""q, k, v and the keywords of a call of the op, from those of the variant's own tensors that are trained."""

Saved = tuple[Tensor, Tensor]
Given = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
"""Of q, k and v, and of the variant's own tensors by name."""


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
    """The first key head of a rank, of those that are repeated so often."""

    first: int
    repeats: int

    def further(self, heads: int) -> "OwnHeads":
        """From so many heads on."""
        return OwnHeads(self.first + heads, self.repeats)


class RowStrategy(Protocol):
    """o and lse of q's rows `[rows, B, H, D]`, and their gradients."""

    def forward(self) -> Saved:
        """o and lse `[rows, B, H, 1]`."""

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        """The gradients of q, k, v and of the trained ones of the variant's own tensors."""


class OwnSums:
    """Gradients of the variant's own tensors, added up over the calls of a rank in float32."""

    def __init__(self, call: Call, trained: Sequence[str]) -> None:
        self.leaves = {name: call.own[name] for name in trained}
        self.total: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Add the gradients of a call."""
        for name, x in found.items():
            self.total[name] = x.float() + self.total[name] if name in self.total else x.float()


class WholeRows:
    """All rows and keys are here, for the heads of this rank: one call of the op."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, heads: OwnHeads) -> None:
        self.call, self.tensors, self.heads = call, (q, k, v), heads

    def _arguments(self, q: Tensor, k: Tensor, v: Tensor, own: Mapping[str, Any]) -> Any:
        call = self.call
        keywords = {**call.keywords, **call.of_heads(own, self.heads, k.shape[2]), **call.tokens}
        if call.packed:
            keywords["cu_seqlens_q"] = call.numbers(call.layout.cu_seqlens)
        return (q, k, v), keywords

    def forward(self) -> Saved:
        tensors, keywords = self._arguments(*self.tensors, self.call.own)
        return self.call.computed(tensors, keywords, self.call.form)

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        call, sums = self.call, OwnSums(self.call, trained)

        def arguments(own: Mapping[str, Tensor]) -> Any:
            return self._arguments(*self.tensors, call.own | dict(own))

        return call.derived(arguments, sums.leaves, saved, given, call.form)


class GatheredRows:
    """The rows of this rank against the keys of all, by groups of key heads."""

    def __init__(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, heads: OwnHeads, layout: Layout, comm: Exchanges
    ) -> None:
        self.call, self.q, self.k, self.v, self.heads, self.layout = call, q, k, v, heads, layout
        self.runs = layout.runs(comm.rank)
        key_heads = k.shape[2]
        groups = layout.head_groups if key_heads % layout.head_groups == 0 else 1
        self.groups = groups if call.work.by_heads else 1
        self.per_group = key_heads // self.groups
        given = {**call.keywords, **call.own, **{name: call.tokens[name] for name in call.gives_tokens}}
        # Numbers on a device are not read while its work is being recorded for a graph.
        knows_values = not (q.is_cuda and torch.cuda.is_current_stream_capturing())
        needs = planned_needs(layout, call.work, given, knows_values=knows_values)
        if needs is None:
            self.exchange = KeyExchange(comm, layout, self.groups, k, v)
        else:
            self.exchange = NeededKeyExchange(comm, layout, self.groups, k, v, needs)
        self.tokens = dict(call.tokens)
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in self.tokens:
                self.tokens.setdefault(of_keys, self.tokens[of_queries])

    def forward(self) -> Saved:
        call, axis = self.call, 2
        o = self.q.new_zeros(*self.q.shape[:3], self.v.shape[3])
        lse = self.q.new_full((*self.q.shape[:3], 1), float("-inf"), dtype=torch.float32)
        for group in range(self.groups):
            k, v = self.exchange.keys(group)
            heads = self._query_heads(group)
            own = call.of_heads(call.own, self.heads.further(group * self.per_group), self.per_group)
            for at, run in zip(starts(self.runs), self.runs, strict=True):
                q, ahead = self.q.narrow(axis, *heads).narrow(0, at, run[1]), self._ahead(run)
                parts = call.computed((longer(q, ahead), k, v), self._keywords(own, run), call.form)
                parts = parts[0][ahead:], parts[1][ahead:]
                if self.groups == len(self.runs) == 1 and run[1] == len(o):
                    return parts
                for whole, part in zip((o, lse), parts, strict=True):
                    whole.narrow(axis, *heads).narrow(0, at, run[1]).copy_(part)
        return o, lse

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        call, sums = self.call, OwnSums(self.call, trained)
        dq = torch.zeros_like(self.q)
        for group in range(self.groups):
            k, v = self.exchange.keys(group)
            heads = self._query_heads(group)
            totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
            for at, run in zip(starts(self.runs), self.runs, strict=True):

                def part(x: Tensor, at: int = at, run: Chunk = run, heads: tuple[int, int] = heads) -> Tensor:
                    return x.narrow(2, *heads).narrow(0, at, run[1])

                ahead = self._ahead(run)
                tensors = longer(part(self.q), ahead), k, v

                def arguments(
                    own: Mapping[str, Tensor],
                    tensors: Sequence[Tensor] = tensors,
                    run: Chunk = run,
                    group: int = group,
                ) -> Any:
                    of_group = self.heads.further(group * self.per_group)
                    whole = call.of_heads(call.own | dict(own), of_group, self.per_group)
                    return tensors, self._keywords(whole, run)

                of_lse = None if given[1] is None else longer(part(given[1]), ahead)
                known = longer(part(saved[0]), ahead), longer(part(saved[1]), ahead, float("inf"))
                of_rows = longer(part(given[0]), ahead), of_lse
                of_q, *of_keys, own = call.derived(arguments, sums.leaves, known, of_rows, call.form)
                for x, change in zip((part(dq), *totals), (of_q[ahead:], *of_keys), strict=True):
                    x.add_(change)
                sums.add(own)
            self.exchange.send(group, *totals)
        dk, dv = self.exchange.receive()
        return dq, dk, dv, sums.total

    def _ahead(self, run: Chunk) -> int:
        """How many rows ahead of a run its call begins. They are zeros, and nothing comes of them."""
        return rows_ahead(self.layout, run[0]) if self.call.keywords.get("dropout_p") else 0

    def _query_heads(self, group: int) -> tuple[int, int]:
        """First and number of the query heads of a group."""
        count = self.q.shape[2] // self.groups
        return group * count, count

    def _keywords(self, own: Mapping[str, Any], run: Chunk) -> dict[str, Any]:
        """The keywords of a call of one run of rows against all keys, and of the rows ahead of it."""
        call, ahead = self.call, self._ahead(run)
        begin, length = run[0] - ahead, run[1] + ahead
        keywords = {**call.keywords, **own}
        if call.packed:
            begins, offsets = sequences_of(self.layout, begin, length)
            keywords["cu_seqlens_q"] = call.numbers(begins)
            keywords["cu_seqlens_k"] = call.numbers(self.layout.cu_seqlens)
            keywords["q_offset"] = call.numbers(offsets)
            for name, x in own.items():
                if isinstance(x, Tensor) and name != "g":
                    for axis, dim in enumerate(call.dims(name, x)):
                        if dim == "q_idx":
                            x = x.narrow(axis, begin, length)
                    keywords[name] = x
            return keywords
        if "q_positions" not in self.tokens:
            keywords["q_offset"] = begin
        for name, x in self.tokens.items():
            keywords[name] = x if name.startswith("kv") else x.narrow(1, begin, length)
        return keywords


def longer(x: Tensor, ahead: int, value: float = 0.0) -> Tensor:
    """`[rows, ...]` with so many rows ahead."""
    return x if ahead == 0 else torch.cat([x.new_full((ahead, *x.shape[1:]), value), x])


def starts(runs: Sequence[Chunk]) -> list[int]:
    """Where each run begins among the rows of its rank."""
    found = [0]
    for _, length in runs[:-1]:
        found.append(found[-1] + length)
    return found[: len(runs)]
