"""The variants as plain mathematics, written from their papers and not from the templates.

In float64 it gives the golden results. In 16 bits it rounds where attention in plain PyTorch does: the score matrix,
the probabilities, the output and, because autograd follows the same casts, their gradients. Sums are kept in float32,
as tensor cores keep them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codegen.testing.golden import Inputs
from generated._runtime.torch.philox import dropout

Entry = Mapping[str, Any]

MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda q_idx, kv_idx: kv_idx <= q_idx,
    "window": lambda q_idx, kv_idx, size: kv_idx > q_idx - size,
    "prefix": lambda q_idx, kv_idx, length: (kv_idx < length) & (q_idx == q_idx),
    "band": lambda q_idx, kv_idx, before, after: (kv_idx >= q_idx - before) & (kv_idx <= q_idx + after),
    "chunk": lambda q_idx, kv_idx, size: q_idx // size == kv_idx // size,
    "natten": lambda q_idx, kv_idx, width, height, kernel: (
        _near(q_idx % width, kv_idx % width, width, kernel) & _near(q_idx // width, kv_idx // width, height, kernel)
    ),
}
SCORES = ("softcap", "alibi")
# The options of a call, besides the variant's own tensors and scalars.
OPTIONS = (
    *("scale", "q_offset", "kv_lengths", "padding_id", "first_batch"),
    *("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions"),
)
RELATIVE_BIAS = "score + bias[h, q_idx - kv_idx]"
PAIR_BIAS = "score + bias[b, h, q_idx, kv_idx]"


def _near(query: Tensor, key: Tensor, size: int, kernel: int) -> Tensor:
    """Along one canvas axis: whether a key is in the window of `kernel` keys around a query, kept within the canvas."""
    first = (query - kernel // 2).clamp(0, size - kernel)
    return (key >= first) & (key < first + kernel)


class _Clamped:
    """A tensor whose indices are clamped to its size, as the language defines it.

    `rows`: pairs (position, row). Along a dim `q_idx` or `kv_idx`, the row in memory replaces the position as index.
    """

    def __init__(self, x: Tensor, dims: Sequence[str | int], rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.x, self.dims, self.rows = x, dims, rows

    def __getitem__(self, indices: Tensor | tuple[Tensor, ...]) -> Tensor:
        indices = indices if isinstance(indices, tuple) else (indices,)
        placed = [self._placed(dim, index) for dim, index in zip(self.dims, indices, strict=True)]
        return self.x[tuple(index.clamp(0, size - 1) for index, size in zip(placed, self.x.shape, strict=True))]

    def _placed(self, dim: str | int, index: Tensor) -> Tensor:
        of_tokens = dim in ("q_idx", "kv_idx")
        return next((row for position, row in self.rows if of_tokens and index is position), index)


def words(text: str) -> list[tuple[str, list[str]]]:
    """`causal and window(128)` as [("causal", []), ("window", ["128"])]."""
    found = [re.fullmatch(r"(\w+)(?:\((.*)\))?", part.strip()) for part in text.split(" and ") if part]
    return [(match[1], match[2].split(", ") if match[2] else []) if match else ("", []) for match in found]


def covers(entry: Entry) -> bool:
    """Whether the mathematics of a variant is written here, that is, its named masks and scores are known."""
    known = {*MASKS, *entry["tensors"], *entry["scalars"], "b", "h", "q_idx", "kv_idx", "and", "or"}
    known_score = entry["score"] in (RELATIVE_BIAS, PAIR_BIAS) or all(
        name in SCORES for name, _ in words(entry["score"])
    )
    return set(re.findall(r"[A-Za-z_]\w*", entry["mask"])) <= known and known_score


def attention(entry: Entry) -> Callable[..., Any]:
    """The op of a variant: `(o, lse)` of `[B, H, S, D]` tensors."""
    return partial(_attend, entry)


def _attend(
    entry: Entry,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = True,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    assert return_lse
    options = {name: value for name, value in arguments.items() if name in OPTIONS}
    own = {name: value for name, value in arguments.items() if name not in OPTIONS}
    call = _Call.of(entry, q, k, own, **options)
    scores = call.scores(_rounded(call.products(q, k), q.dtype))
    probs, lse, _ = call.softmax(scores)
    o = _heads(_rounded(call.dropped(probs), q.dtype), k.shape[1]) @ _wide(v).unsqueeze(2)
    return o.flatten(1, 2).to(q.dtype), lse


def _wide(x: Tensor) -> Tensor:
    wide: Tensor = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _heads(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, ...] as [B, Hkv, group, ...]."""
    heads: Tensor = x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))
    return heads


def _products(x: Tensor, y: Tensor) -> Tensor:
    """The products of every row of x `[B, Hq, ...]` with every row of y `[B, Hkv, ...]`."""
    return (_heads(_wide(x), y.shape[1]) @ _wide(y).unsqueeze(2).mT).flatten(1, 2)


def _called(text: str) -> str:
    """The text as a call: a named mask without arguments is a function too."""
    return f"{text}()" if text in MASKS else text


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call: positions `[B or 1, 1, Sq, 1]` and `[B or 1, 1, 1, Skv]`, and the variant's own arguments.

    `q_row` and `kv_row` index tensors with an element per token. `seen`: the pairs that segments and lengths allow,
    whatever the mask. A dropout numbers batch rows from `first_batch` on.
    """

    entry: Entry
    scale: float
    q_idx: Tensor
    kv_idx: Tensor
    q_row: Tensor
    kv_row: Tensor
    seen: Tensor
    batch: int
    heads: int
    first_batch: int
    own: Mapping[str, Any]

    @staticmethod
    def of(
        entry: Entry,
        q: Tensor,
        k: Tensor,
        own: Mapping[str, Any],
        *,
        scale: float | None = None,
        q_offset: Any = 0,
        q_segment_ids: Tensor | None = None,
        kv_segment_ids: Tensor | None = None,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        padding_id: int = -1,
        first_batch: int = 0,
    ) -> _Call:
        q_len, kv_len = q.shape[2], k.shape[2]
        lengths = torch.as_tensor(kv_len if kv_lengths is None else kv_lengths, device=q.device).view(-1, 1, 1, 1)
        offset = lengths - q_len if isinstance(q_offset, str) else torch.as_tensor(q_offset, device=q.device)
        q_row = torch.arange(q_len, device=q.device)[:, None] + offset.view(-1, 1, 1, 1)
        kv_row = torch.arange(kv_len, device=q.device).view(1, 1, 1, -1)
        seen = kv_row < lengths
        if q_segment_ids is not None:
            queries = q_segment_ids[:, None, :, None]
            keys = (q_segment_ids if kv_segment_ids is None else kv_segment_ids)[:, None, None, :]
            seen = seen & (queries == keys) & (queries != padding_id)
        q_idx, kv_idx = q_row, kv_row
        if q_positions is not None:
            q_idx = q_positions[:, None, :, None].long()
            kv_idx = (q_positions if kv_positions is None else kv_positions)[:, None, None, :].long()
        return _Call(
            entry=entry,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            q_idx=q_idx,
            kv_idx=kv_idx,
            q_row=q_row,
            kv_row=kv_row,
            seen=seen,
            batch=len(q),
            heads=q.shape[1],
            first_batch=first_batch,
            own=own,
        )

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return _products(q, k) * self.scale

    def keep(self) -> Tensor:
        seen = self.seen & torch.ones_like(self.q_idx == self.kv_idx)
        if not self.entry["mask"]:
            return seen
        named = {name: partial(mask, self.q_idx, self.kv_idx) for name, mask in MASKS.items()}
        dims = {name: declared["dims"] for name, declared in self.entry["tensors"].items()}
        rows = [(self.q_idx, self.q_row), (self.kv_idx, self.kv_row)]
        own = {name: _Clamped(x, dims[name], rows) if name in dims else x for name, x in self.own.items()}
        b, h = (torch.arange(n, device=self.kv_idx.device) for n in (self.batch, self.heads))
        indices = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q_idx": self.q_idx, "kv_idx": self.kv_idx}
        scope = {**named, **own, **indices}
        # Python's `and` takes no tensors; a comparison binds closer than `&` only in parentheses.
        parts = re.split(r"\b(and|or)\b", self.entry["mask"])
        text = "".join({"and": " & ", "or": " | "}.get(part) or f"({_called(part.strip())})" for part in parts)
        keep: Tensor = eval(text, {"__builtins__": {}}, scope)  # the text is this project's own
        return keep & seen

    def scores(self, products: Tensor) -> Tensor:
        """The scaled products after the variant's score expression and its decay."""
        scores = products
        if self.entry["score"] == RELATIVE_BIAS:
            bias = self.own["bias"].to(scores.dtype)
            distance = (self.q_idx - self.kv_idx).clamp(0, bias.shape[1] - 1)  # [B or 1, 1, Sq, Skv]
            biased: Tensor = scores + bias[:, distance[:, 0]].transpose(0, 1)
            return biased
        if self.entry["score"] == PAIR_BIAS:
            bias = self.own["bias"].to(scores.dtype)
            b, h = (torch.arange(n, device=bias.device) for n in scores.shape[:2])
            rows, keys = (x.clamp(0, n - 1) for x, n in zip((self.q_row, self.kv_row), bias.shape[2:], strict=True))
            per_pair: Tensor = scores + bias[b.view(-1, 1, 1, 1), h.view(-1, 1, 1), rows, keys]
            return per_pair
        for name, arguments in words(self.entry["score"]):
            if name == "softcap":
                cap = float(self.own.get(arguments[0], arguments[0]))  # a scalar, or a number
                scores = cap * torch.tanh(scores / cap)
            else:
                distance = (self.kv_idx - self.q_idx).to(scores.dtype)
                scores = scores + self.own["slope"].to(scores.dtype).view(-1, 1, 1) * distance
        if self.entry["decay"]:
            total = self.own["g"].to(scores.dtype).cumsum(1).transpose(1, 2)  # [B, H, P]
            at_query = self.q_row.clamp(0, total.shape[2] - 1).squeeze(-1)
            at_query = total.gather(2, at_query.expand(total.shape[0], total.shape[1], -1))
            scores = scores + at_query[..., None] - total[:, :, None, : self.kv_row.shape[-1]]
        return scores

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Probabilities, log of the denominator, and the probability of the sink, or None without a sink."""
        keep = self.keep()
        masked = scores.masked_fill(~keep, float("-inf"))
        sink = self.own["sink"].to(scores.dtype).view(-1, 1, 1) if self.entry["sink"] else None
        candidates = [masked, scores.new_full((*scores.shape[:3], 1), float("-inf"))]
        candidates += [sink.expand(*scores.shape[:3], 1)] if sink is not None else []
        top = torch.cat([part.detach() for part in candidates], -1).amax(-1, keepdim=True)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(masked - top)
        sink_weight = None if sink is None else torch.exp(sink - top)
        total = weights.sum(-1, keepdim=True) + (0.0 if sink_weight is None else sink_weight)
        empty = total == 0
        safe = total.masked_fill(empty, 1.0)
        lse = (top + safe.log()).masked_fill(empty, float("-inf")).squeeze(-1)
        return weights / safe, lse, None if sink_weight is None else sink_weight / safe

    def dropped(self, probs: Tensor) -> Tensor:
        """The probabilities after dropout, with the same random words as the kernels."""
        if not self.own.get("dropout_p"):
            return probs
        # Dropout counts query rows, not positions. The first row is the offset.
        origin = (self.q_row[..., :1, :], self.first_batch * self.heads, self.heads)
        return dropout(probs, self.own["dropout_p"], self.own["seed"], *origin)


def smallest_size(dtype: torch.dtype) -> float:
    """The size below which the rounding error of a term no longer shrinks with the term: subnormal numbers of `dtype`
    have the spacing of its smallest normal number. Besides, exp2 gives float32 results whatever the dtype, and flushes
    subnormal results to 0 (PTX ex2.approx.ftz). That error is as large as the smallest normal number, not its eps."""
    return max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny / torch.finfo(dtype).eps)


def term_sizes(entry: Entry, inputs: Inputs, dtype: torch.dtype, **options: Any) -> tuple[dict[str, Tensor], float]:
    """What each result would be if none of its terms cancelled, and the same for the largest score.

    Rounding a term changes a result by that term's size times eps, however small the result itself is. `inputs` are
    float64. Sizes are at least `smallest_size`, below which the spacing of numbers is constant.
    """
    tiny = smallest_size(dtype)
    x = inputs
    call = _Call.of(entry, x.q, x.k, x.tensors | x.scalars, **options)
    kv_heads = x.k.shape[1]
    keep = call.keep().double()
    trained = {name: tensor for name, tensor in x.tensors.items() if tensor.requires_grad and name != "sink"}

    products = call.products(x.q, x.k).detach().requires_grad_()
    scores = call.scores(products)
    with torch.no_grad():
        probs, lse, sink_probs = call.softmax(scores)
        probs = probs.clamp(min=tiny) * keep
        factor = call.dropped(keep.expand_as(probs))
        value_sizes = (_heads(probs * factor, kv_heads) @ x.v.abs().unsqueeze(2)).flatten(1, 2)
        row = (x.do.abs() * value_sizes).sum(-1, keepdim=True) + x.dlse.abs()[..., None]
        score_sizes = (probs * (_products(x.do.abs(), x.v.abs()) * factor + row)).clamp(min=tiny) * keep
    grads = torch.autograd.grad(scores, [products, *trained.values()], score_sizes, allow_unused=True)
    with torch.no_grad():
        # Not only times the derivative of the score expression: 1 - tanh(x)**2 has terms of 1, however small it is.
        product_sizes = _heads(abs(call.scale) * torch.maximum(grads[0].abs(), score_sizes), kv_heads)
        sizes = {
            "o": value_sizes,
            "dq": (product_sizes @ x.k.abs().unsqueeze(2)).flatten(1, 2),
            "dk": (product_sizes.mT @ _heads(x.q.abs(), kv_heads)).sum(2),
            "dv": (_heads(probs * factor, kv_heads).mT @ _heads(x.do.abs(), kv_heads)).sum(2),
        }
        for name, grad in zip(trained, grads[1:], strict=True):
            sizes[f"d{name}"] = torch.zeros_like(trained[name]) if grad is None else grad.abs()
        if "g" in trained:
            # All scores in which a position takes part, as a query or as a key: terms on both sides of g cancel.
            at_positions = torch.zeros_like(x.tensors["g"]).transpose(1, 2)
            rows = call.q_row.clamp(0, at_positions.shape[2] - 1).squeeze(-1).expand(*x.q.shape[:3])
            at_positions = at_positions.scatter_add(2, rows, score_sizes.sum(3))
            at_positions[:, :, : x.k.shape[2]] += score_sizes.sum(2)
            sizes["dg"] = at_positions.flip(2).cumsum(2).flip(2).transpose(1, 2)
        if sink_probs is not None and x.tensors["sink"].requires_grad:
            sizes["dsink"] = (sink_probs * row).sum((0, 2, 3))
        sizes = {name: size.clamp(min=tiny) for name, size in sizes.items()}
        largest = (abs(call.scale) * _products(x.q.abs(), x.k.abs()) + scores.abs()) * keep
        if "g" in x.tensors:
            largest = largest + 2 * x.tensors["g"].cumsum(1).abs().max()
        ends = [1.0, *(part.max().item() for part in (largest, lse.nan_to_num(neginf=0.0).abs()) if part.numel())]
    return sizes, max(ends)
