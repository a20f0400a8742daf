"""What a call of a variant is by definition, from its entry: o, lse and every gradient, and the size of their terms.

Written from README.md alone. Queries and keys of all batch rows, or sequences, lie one behind the other
here, `[rows, H, D]` and `[keys, Hkv, D]`, and a table says which pairs belong together. Scores exist at kept pairs
only: what a masked pair would be is never computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .expressions import ROWS, STILL, Nudge, Pairs, Value, evaluate
from .philox import kept_factor

Entry = Mapping[str, Any]
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Queries, or keys, of a call one behind the other: vectors with an element per token.

    begin and size: the first token and the number of tokens of each batch row or sequence.
    """

    batch: Tensor
    row: Tensor
    position: Tensor
    local: Tensor
    segment: Tensor
    begin: Tensor
    size: Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call without its layout. `tensors` are the variant's own, `sink` and `g` among them, as the call gives them.

    queries.row includes the offset; `offset` has an element per batch row or sequence. `reach` is the number of keys
    that each of these has, `kv_lengths`. `masked_segment` attends to nothing.
    """

    entry: Entry
    packed: bool
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]
    queries: Tokens
    keys: Tokens
    offset: Tensor
    reach: Tensor
    masked_segment: int
    scale: float
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything that a gradient is wanted of."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.tensors}
        return {name: x for name, x in named.items() if x.requires_grad}


class Attention:
    """One evaluation. `precision` is the dtype whose roundings are made where plain PyTorch makes them, or float64."""

    def __init__(self, problem: Problem, precision: torch.dtype = torch.float64, nudge: Nudge = STILL) -> None:
        self.p = problem
        self.precision = precision
        self.dtype = torch.float64 if precision == torch.float64 else torch.float32
        self.nudge = nudge
        self.device = problem.q.device
        cast = {name: self._leaf(x) for name, x in problem.tensors.items()}
        self.tensors = cast
        self.q, self.k, self.v = (self._leaf(x) for x in (problem.q, problem.k, problem.v))
        self._forward()

    def _leaf(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return x.detach().to(self.dtype).requires_grad_(x.requires_grad)

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.precision in (torch.float64, torch.float32) else x.to(self.precision).to(self.dtype)

    # ---------------------------------------------------------------------------------------------------------- forward

    def _pairs(self, r: Tensor, t: Tensor, h: Tensor) -> Pairs:
        p = self.p
        group = p.heads // p.k.shape[1]
        b = p.queries.batch[r]
        names: dict[str, Value] = {
            "b": b,
            "q_len": p.queries.size[b],
            "kv_len": p.reach[b],
            "h": h,
            "hkv": h // group,
            "q_row": p.queries.row[r],
            "kv_row": p.keys.row[t],
            "q_position": p.queries.position[r],
            "kv_position": p.keys.position[t],
        }
        names |= {"q_idx": names["q_position"], "kv_idx": names["kv_position"], **p.scalars}
        dims = {name: declared["dims"] for name, declared in p.entry.get("tensors", {}).items()}
        return Pairs(
            count=len(r),
            names=names,
            dims=dims,
            read=self._read,
            dtype=self.dtype,
            device=self.device,
            nudge=self.nudge,
        )

    def _read(self, name: str, indices: Sequence[Value], pairs: Pairs) -> Tensor:
        """An element of a tensor at each pair; an index that leaves its dim reads the nearest end."""
        x, dims = self.tensors[name], self.p.entry["tensors"][name]["dims"]
        b = pairs.names["b"]
        assert isinstance(b, Tensor)
        packed = self.p.packed and any(dim in ROWS for dim in dims)
        places = []
        for dim, index in zip(dims, indices, strict=True):
            if packed and dim == "b":
                continue
            place = torch.as_tensor(index, device=self.device).long().expand(pairs.count)
            if packed and dim in ROWS:
                tokens = self.p.keys if dim == "kv_idx" else self.p.queries
                if dim == "q_idx":
                    place = place.clamp(min=0) - self.p.offset[b]
                place = tokens.begin[b] + torch.minimum(place.clamp(min=0), tokens.size[b] - 1)
            places.append(place)
        sized = zip(places, x.shape, strict=True)
        return x[tuple(place.clamp(0, size - 1) for place, size in sized)] if places else x.expand(pairs.count)

    def _kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query row, key and head of each pair that attends."""
        p = self.p
        together = p.queries.batch[:, None] == p.keys.batch
        together &= (p.queries.segment[:, None] == p.keys.segment) & (p.keys.segment != p.masked_segment)
        together &= p.keys.local < p.reach[p.keys.batch] if len(p.reach) else together
        r, t = together.nonzero(as_tuple=True)
        h = torch.arange(p.heads, device=self.device)
        r, t, h = r.repeat(p.heads), t.repeat(p.heads), h.repeat_interleave(len(r))
        if p.entry.get("mask") and len(r):
            with torch.no_grad():
                keep = evaluate(p.entry["mask"], self._pairs(r, t, h))
            r, t, h = r[keep], t[keep], h[keep]
        return r, t, h

    def _decay(self, r: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The running sum of the log-decay at the query and at the key of each pair."""
        p, g = self.p, self.tensors["g"]
        b = p.queries.batch[r]
        if p.packed:
            sizes = p.keys.size.tolist()
            total = torch.cat([part.cumsum(0) for part in g.split(sizes)]) if sizes else g
            row = torch.minimum(p.queries.row[r].clamp(min=0), p.keys.size[b] - 1)
            return total[p.keys.begin[b] + row, h], total[t, h]
        total = g.cumsum(1)
        batch = b.clamp(max=g.shape[0] - 1)
        return total[batch, p.queries.row[r].clamp(0, g.shape[1] - 1), h], total[batch, p.keys.row[t], h]

    def _forward(self) -> None:
        p = self.p
        r, t, h = self._kept()
        rows = len(self.q)
        group = p.heads // p.k.shape[1]
        products = torch.einsum("rhd,thd->hrt", self.q, self.k.repeat_interleave(group, 1))
        self.product = self._rounded(products[h, r, t]) * p.scale
        if "inf" in p.entry.get("score", ""):
            # A score of -inf leaves a pair out as the mask does.
            kept = evaluate(p.entry["score"], self._pairs(r, t, h).where(score=self.product)) != -math.inf
            r, t, h, self.product = (x[kept] for x in (r, t, h, self.product))
        self.r, self.t, self.h = r, t, h
        self.score = self.product
        if p.entry.get("score"):
            self.score = evaluate(p.entry["score"], self._pairs(r, t, h).where(score=self.product)).to(self.dtype)
        self.by_key = None
        if p.entry.get("decay"):
            at_query, at_key = self._decay(r, t, h)
            self.score, self.by_key = self.score + (at_query - at_key), at_query + at_key
        self._softmax(rows, group)

    def _softmax(self, rows: int, group: int) -> None:
        p, score = self.p, self.score
        place = self.h * rows + self.r
        top = torch.full((p.heads * rows,), -math.inf, dtype=self.dtype, device=self.device)
        top = top.scatter_reduce(0, place, score.detach(), "amax")
        sink = self.tensors["sink"].to(self.dtype).repeat_interleave(rows) if p.entry.get("sink") else None
        if sink is not None:
            top = torch.maximum(top, sink.detach())
        filled = top > -math.inf
        top = torch.where(filled, top, 0.0)
        weight = torch.exp(score - top[place])
        total = torch.zeros_like(top).index_add(0, place, weight)
        if sink is not None:
            total = total + torch.exp(sink - top)
        log = (torch.log(total[filled]) + top[filled]).to(self.dtype)
        lse = torch.full_like(top, -math.inf).index_put((filled.nonzero()[:, 0],), log)
        self.finite, self.log = filled, log
        self.lse = lse.view(p.heads, rows)
        self.prob = weight / torch.where(filled, total, 1.0)[place]
        self.sink_prob = None if sink is None else (torch.exp(sink - top) / total).view(p.heads, rows)
        self.factor = torch.ones_like(score)
        if p.entry.get("dropout") and p.dropout_p:
            local, key, batch = p.queries.local[self.r], p.keys.local[self.t], p.queries.batch[self.r]
            row = local + p.offset[batch] // 16 * 16
            self.factor = kept_factor(p.dropout_p, p.seed, batch * p.heads + self.h, row, key).to(self.dtype)
        dense = self._dense(self._rounded(self.prob * self.factor))
        self.o = self._rounded(torch.einsum("hrt,thd->rhd", dense, self.v.repeat_interleave(group, 1)))

    def _dense(self, x: Tensor) -> Tensor:
        """A value per pair as `[H, rows, keys]`, 0 elsewhere."""
        shape = (self.p.heads, len(self.q), len(self.k))
        return torch.zeros(shape, dtype=self.dtype, device=self.device).index_put((self.h, self.r, self.t), x)

    # -------------------------------------------------------------------------------------------------------- gradients

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, **self.tensors}
        return {name: x for name, x in named.items() if x.requires_grad}

    def results(self, with_lse: bool) -> Results:
        """o `[rows, H, Dv]`, lse `[H, rows]`, and `d` with the name of each leaf."""
        found = {"o": self.o.detach(), "lse": self.lse.detach()}
        leaves = self.leaves
        if not leaves:
            return found
        loss = (self.o * self.p.do.to(self.dtype)).sum()
        if with_lse:
            loss = loss + (self.log * self.p.dlse.to(self.dtype).reshape(-1)[self.finite]).sum()
        loss = loss + sum((x.sum() * 0 for x in leaves.values()), loss.new_zeros(()))
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def sizes(self, with_lse: bool, tiny: float) -> Results:
        """What each result would be if none of its terms cancelled: a rounding of a term moves it by eps of that."""
        p, r, t, h = self.p, self.r, self.t, self.h
        group = p.heads // p.k.shape[1]
        grown = {"k": self.k.repeat_interleave(group, 1).abs(), "v": self.v.repeat_interleave(group, 1).abs()}
        with torch.no_grad():
            prob = self.prob.clamp(min=tiny)
            weighted = self._dense(prob * self.factor)
            do = p.do.to(self.dtype).abs()
            sizes = {"o": torch.einsum("hrt,thd->rhd", weighted, grown["v"])}
            row = (do * sizes["o"]).sum(2).T
            row = row + p.dlse.to(self.dtype).abs() if with_lse else row
            slopes = torch.einsum("rhd,thd->hrt", do, grown["v"])[h, r, t] * self.factor
            terms = prob * (slopes + row[h, r])
        through = self._through(terms)
        with torch.no_grad():
            # The derivative of a score expression may cancel, such as 1 - tanh(x)**2, and its terms do not.
            product = self._dense(abs(p.scale) * torch.maximum(through.pop("product"), terms))
            sizes["dq"] = torch.einsum("hrt,thd->rhd", product, grown["k"])
            dk = torch.einsum("hrt,rhd->thd", product, self.q.abs())
            dv = torch.einsum("hrt,rhd->thd", weighted, do)
            sizes["dk"], sizes["dv"] = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
            if self.sink_prob is not None:
                sizes["dsink"] = (self.sink_prob * row).sum(1)
        return sizes | {f"d{name}": size for name, size in through.items()}

    def _through(self, terms: Tensor) -> dict[str, Tensor]:
        """Sizes of the gradients of the product and of own tensors, from those of the gradients of scores.

        Derivatives of both signs cancel: random signs tell how large their terms are.
        """
        names = [name for name in self.leaves if name not in ("q", "k", "v", "sink")]
        wanted = {"product": self.product, **{name: self.tensors[name] for name in names}}
        if not self.score.requires_grad:
            return {name: torch.zeros_like(x) for name, x in wanted.items()}
        found = {name: torch.zeros_like(x) for name, x in wanted.items()}
        signs = torch.Generator(device=self.device).manual_seed(0)
        for draw in range(5):
            flips = torch.randint(0, 2, terms.shape, generator=signs, device=self.device) * 2 - 1 if draw else 1
            grads = torch.autograd.grad(
                self.score, list(wanted.values()), terms * flips, retain_graph=True, allow_unused=True
            )
            for name, grad in zip(wanted, grads, strict=True):
                if grad is not None:
                    found[name] = torch.maximum(found[name], grad.abs() * (2 if draw else 1))
        if "g" in found and self.by_key is not None:
            (grad,) = torch.autograd.grad(self.by_key, [self.tensors["g"]], terms, retain_graph=True)
            found["g"] = grad.abs()
        return found

    def largest_score(self) -> float:
        """The largest term of a score, at least 1: a float32 score is off by eps of it."""
        p, group = self.p, self.p.heads // self.p.k.shape[1]
        with torch.no_grad():
            reach = torch.einsum("rhd,thd->hrt", self.q.abs(), self.k.repeat_interleave(group, 1).abs())
            reach = abs(p.scale) * reach[self.h, self.r, self.t]
            ends = [1.0]
            ends += [x.abs().max().item() for x in (reach + self.score.abs(), self.log) if x.numel()]
            if "g" in self.tensors:
                ends.append(1 + 2 * float(self.tensors["g"].abs().sum(0 if p.packed else 1).max()) + max(ends))
        return max(ends)
