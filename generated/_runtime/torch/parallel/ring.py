# SPDX-License-Identifier: Apache-2.0
"""A ring of ranks: keys go from rank to rank, and each rank computes with those it has. None has the keys of all.

o and lse of the steps are merged in float32. The backward computes each step from the merged o and lse, and the
gradients of keys travel with them in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...core.checks import PACKED
from ...core.options import LENGTHS
from ...core.parallel.calls import TOKENS
from ...core.parallel.key_needs import planned_needs
from ...core.parallel.ring_steps import NO_SINK, keeps_rows_apart, ring_steps, takes_apart
from ...core.parallel.shards import Layout
from .collectives import Exchanges
from .exchange import index, split_features
from .ring_pairs import PackedPair, Pair, dense_pairs, packed_pairs, pairs_by_document, takes_documents
from .row_strategies import Call, Given, Gradients, OwnHeads, OwnSums, Saved


class RingRows:
    """The rows of this rank against the keys of one rank after the other."""

    def __init__(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, heads: OwnHeads, layout: Layout, comm: Exchanges
    ) -> None:
        self.call, self.q, self.k, self.v, self.heads = call, q, k, v, heads
        self.layout, self.comm = layout, comm
        self.drops = bool(call.keywords.get("dropout_p"))
        given = {**call.keywords, **call.own, **{name: call.tokens[name] for name in call.gives_tokens}}
        needs = planned_needs(layout, call.work, given, knows_values=False)
        self.steps = ring_steps(layout, call.work, needs, call.gives_tokens)
        self.by_offset = keeps_rows_apart(call.work) and "q_positions" not in call.gives_tokens
        # Packed documents take packed calls if these can say where keys are. If not, each document takes its own dense
        # calls if something is read or drawn by document; else all documents are one batch row with ids.
        self.by_documents = call.packed and self.by_offset and takes_documents(call.work)
        self.one_by_one = call.packed and not self.by_documents and takes_apart(call.work, drops=self.drops)
        self.form = "bhsd" if call.packed else call.form
        self.tokens = {} if self.by_documents else self._tokens()

    def _tokens(self) -> dict[str, Tensor]:
        """Ids and positions of all rows, of queries and of keys."""
        layout, found = self.layout, dict(self.call.tokens)
        batch, device = self.q.shape[1], self.q.device
        if layout.cu_seqlens is not None and not self.one_by_one:
            found["q_segment_ids"] = index(layout, "sequence_numbers", device).to(torch.int32).expand(batch, -1)
        if not self.by_offset and "q_positions" not in found:
            found["q_positions"] = index(layout, "row_positions", device).to(torch.int32).expand(batch, -1)
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in found:
                found.setdefault(of_keys, found[of_queries])
        return found

    # -------------------------------------------------------------------------------------------------- the two passes

    def forward(self) -> Saved:
        o = self.q.new_zeros((*self.q.shape[:3], self.v.shape[3]), dtype=torch.float32)
        lse = self.q.new_full((*self.q.shape[:3], 1), float("-inf"), dtype=torch.float32)
        own = self.call.of_heads(self.call.own, self.heads, self.k.shape[2])
        for owner, k, v in self._keys():
            for pair in self._pairs(owner):
                tensors = pair.rows(self.q), pair.of_keys(k), pair.of_keys(v)
                part = self.call.computed(tensors, self._keywords(own, pair), self._form(pair))
                wholes = pair.rows(o), pair.rows(lse)
                merge(*wholes, *part)
                pair.put(o, wholes[0])
                pair.put(lse, wholes[1])
        return o.to(self.q.dtype), lse

    def backward(self, saved: Saved, given: Given, trained: Sequence[str]) -> Gradients:
        call, sums = self.call, OwnSums(self.call, trained)
        dq = torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device)
        shapes = [x.shape[1:] for x in (self.k, self.v)]
        total = dq.new_zeros(len(self.q), sum(map(prod, shapes)))
        for step, (owner, k, v) in enumerate(self._keys()):
            total = self._next(total) if step else total
            of_keys = split_features(total, shapes)
            for pair in self._pairs(owner):
                tensors = pair.rows(self.q), pair.of_keys(k), pair.of_keys(v)

                def arguments(
                    own: Mapping[str, Tensor], tensors: Sequence[Tensor] = tensors, pair: Pair | PackedPair = pair
                ) -> Any:
                    whole = call.of_heads(call.own | dict(own), self.heads, self.k.shape[2])
                    return tensors, self._keywords(whole, pair)

                of_rows = pair.rows(given[0]), None if given[1] is None else pair.rows(given[1])
                known, form = (pair.rows(saved[0]), pair.rows(saved[1], float("inf"))), self._form(pair)
                if "g" in call.own:
                    # The backward of a log-decay needs o and lse of exactly the keys in its call.
                    part = call.computed(tensors, arguments({})[1], form)
                    known, of_rows = part, of_part(part, known, of_rows)
                *found, own = call.derived(arguments, sums.leaves, known, of_rows, form, wide_dq=True)
                pair.add(dq, found[0])
                for x, change in zip(of_keys, found[1:], strict=True):
                    pair.add_keys(x, change)
                sums.add(own)
        dk, dv = split_features(self._moved(total, 1 - self.steps.count), shapes)
        return dq.to(self.q.dtype), dk, dv, sums.total

    def kept(self) -> list[Tensor]:
        return []

    # ------------------------------------------------------------------------------------------------ what is sent

    def _keys(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The keys of one rank after the other, this rank's first: the owner's number, k and v `[local, B, H, D]`.

        The keys of the next step are sent while a step is computed.
        """
        shapes = [x.shape[1:] for x in (self.k, self.v)]
        rows = torch.cat([self.k.flatten(1), self.v.flatten(1)], 1)
        for step in range(self.steps.count):
            is_last = step == self.steps.count - 1
            coming = None if is_last else self._sent(rows, 1)
            k, v = split_features(rows, shapes)
            yield (self.comm.rank - step) % self.comm.size, k, v
            rows = rows if coming is None else self.comm.wait(coming)

    def _sent(self, x: Tensor, distance: int) -> Tensor:
        """Start to send rows to the rank `distance` ahead, and to receive those of the rank `distance` behind."""
        size, rank = self.comm.size, self.comm.rank
        to, source = (rank + distance) % size, (rank - distance) % size
        sent, received = ([len(x) if other == each else 0 for other in range(size)] for each in (to, source))
        return self.comm.exchange(x, received, sent)

    def _moved(self, x: Tensor, distance: int) -> Tensor:
        return x if distance % self.comm.size == 0 else self.comm.wait(self._sent(x, distance))

    def _next(self, x: Tensor) -> Tensor:
        return self._moved(x, 1)

    # -------------------------------------------------------------------------------------------------------- one call

    def _pairs(self, owner: int) -> Iterator[Pair | PackedPair]:
        """The pairs of rows and keys that are computed with the keys of rank `owner`."""
        call = self.layout, self.steps, self.comm.rank, owner
        if self.by_documents:
            return iter(packed_pairs(*call, self.q.device, drops=self.drops))
        return pairs_by_document(*call, drops=self.drops) if self.one_by_one else dense_pairs(*call, drops=self.drops)

    def _form(self, pair: Pair | PackedPair) -> str:
        """The layout of q, k and v in the call of a pair."""
        return PACKED if isinstance(pair, PackedPair) else self.form

    def _keywords(self, own: Mapping[str, Any], pair: Pair | PackedPair) -> dict[str, Any]:
        """The keywords of a call of a pair."""
        if isinstance(pair, PackedPair):
            keywords = {**self.call.keywords, **own, "q_offset": pair.q_offset}
            keywords |= {"cu_seqlens_q": pair.queries.cu_seqlens, "cu_seqlens_k": pair.keys.cu_seqlens}
            return self._with_sink(keywords, own, pair)
        queries, keys = pair.queries, pair.keys
        keywords = {**self.call.keywords, "layout": self.form}
        if self.by_documents or self.one_by_one:
            # A call of one document is dense, and takes no length of the longest sequence.
            keywords = {name: x for name, x in keywords.items() if name not in LENGTHS}
        if self.by_offset:
            keywords["q_offset"] = queries.begin - keys.begin
        for name, x in self.tokens.items():
            part = keys if name.startswith("kv") else queries
            keywords[name] = x.narrow(1, pair.start + part.begin, part.length)
        lengths = keywords.get("kv_lengths")
        if self.call.work.by_length:
            keywords["kv_lengths"] = self._all_keys(pair) if lengths is None else lengths
        elif lengths is not None:
            keywords["kv_lengths"], lengths = (lengths - keys.begin).clamp(0, keys.length), None
        for name, x in own.items():
            keywords[name] = self._moved_own(name, x, pair) if isinstance(x, Tensor) else x
        if keys.ahead or lengths is not None:
            self._hide_keys(keywords, pair, lengths)
        if self.drops:
            batch_row, head, all_heads = own["dropout_origin"]
            first_row = keys.begin if self.by_offset else queries.begin
            keywords["dropout_origin"] = batch_row + pair.document, head, all_heads, first_row, keys.begin
        return self._with_sink(keywords, own, pair)

    def _all_keys(self, pair: Pair) -> Tensor:
        """The number of keys of the whole call, or of a pair's document, for each batch row."""
        ends = self.layout.cu_seqlens
        count = self.layout.seq if ends is None else ends[pair.document + 1] - ends[pair.document]
        return self.call.numbers((count,)).expand(self.q.shape[1])

    def _hide_keys(self, keywords: dict[str, Any], pair: Pair, lengths: Tensor | None) -> None:
        """By segment ids, let no query attend to keys of zeros, or to keys from each batch row's `lengths` on."""
        batch, padding = self.q.shape[1], keywords.get("padding_id", -1)
        if "q_segment_ids" not in keywords:
            shown = self.call.numbers((0 if padding else 1,))
            keywords["q_segment_ids"] = shown.expand(batch, pair.queries.length)
            keywords["kv_segment_ids"] = shown.expand(batch, pair.keys.length)
        places = torch.arange(pair.keys.length, device=self.q.device)
        hidden = places < pair.keys.ahead
        if lengths is not None:
            hidden = hidden | (places + pair.keys.begin >= lengths[:, None])
        keywords["kv_segment_ids"] = torch.where(hidden, padding, keywords["kv_segment_ids"])

    def _with_sink(self, keywords: dict[str, Any], own: Mapping[str, Any], pair: Pair | PackedPair) -> dict[str, Any]:
        """Count the sink of a row once: in the pair of its own keys. In other pairs it has no weight."""
        if "sink" in own and not pair.counts_sink:
            keywords["sink"] = torch.full_like(own["sink"], NO_SINK, dtype=torch.float32)
        return keywords

    def _moved_own(self, name: str, x: Tensor, pair: Pair) -> Tensor:
        """One of the variant's own tensors, whose axes of rows and keys begin where those of the pair's call do."""
        queries, keys, start = pair.queries, pair.keys, pair.start
        dims = self.call.dims(name, x)
        for axis, dim in enumerate(dims):
            if dim == "b" and self.one_by_one:
                x = x.narrow(axis, pair.document, 1)
            if dim not in ("q_idx", "kv_idx"):
                continue
            if self.by_offset:
                end = max(keys.begin + keys.length, queries.begin + queries.length)
                x = x.narrow(axis, start + keys.begin, end - keys.begin)
            else:
                part = queries if dim == "q_idx" else keys
                x = x.narrow(axis, start + part.begin, part.length)
        declared = self.call.work.tensors[name]
        return x.unsqueeze(list(declared).index("b")) if len(dims) < len(declared) else x


def of_part(part: Saved, whole: Saved, given: Given) -> Given:
    """The gradients of a part's o and lse from those of the whole, float32 lse `[rows, B, H, 1]`."""
    (o, lse), (do, dlse) = part, given
    share = torch.where(torch.isinf(lse), 0.0, torch.exp(lse - whole[1]))
    change = ((o.float() - whole[0].float()) * do.float()).sum(-1, keepdim=True)
    return (do * share).to(do.dtype), share * (change if dlse is None else change + dlse)


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part's o and lse into o and lse, `[rows, B, H, ...]`, float32; the lse of a row without keys is -inf."""
    total = torch.logaddexp(lse, part_lse)
    finite = torch.where(torch.isinf(total), 0.0, total)
    o.mul_(torch.exp(lse - finite)).add_(part * torch.exp(part_lse - finite))
    lse.copy_(total)
