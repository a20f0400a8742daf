"""Variants that read tensors of tokens in unusual ways, and their results by the definitions of the README alone.

Python evaluates a variant's text, one sequence after the other, in float64: no code is shared with the generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import yaml
from torch import Tensor

from generated._runtime.core.sequences import ByRow

TOKENS = ("q_idx", "kv_idx")
HEADS, KV_HEADS, DIM, FREE = 2, 1, 16, 60

SPEC = """
variants:
  keys_of_queries: {mask: q_idx >= kv_idx, score: "score + w[kv_idx]", tensors: {w: {dims: [q_idx], grad: true}}}
  keys_unmasked: {score: "score + w[kv_idx]", tensors: {w: {dims: [q_idx], grad: true}}}
  heads_of_keys: {score: "score * w[b, h] + w[b, h + 1]", tensors: {w: {dims: [b, kv_idx], grad: true}}}
  heads_of_queries: {score: "score + w[h]", tensors: {w: {dims: [q_idx], grad: true}}}
  queries_of_keys: {score: "score + w[h, q_idx]", tensors: {w: {dims: [h, kv_idx], grad: true}}}
  seen_keys: {mask: "seen[kv_idx]", tensors: {seen: {dims: [q_idx], dtype: bool}}}
  one_limit: {mask: "lim[3] > kv_idx", tensors: {lim: {dims: [q_idx], dtype: int32}}}
  two_limits: {mask: "(lim[b, 1] >= kv_idx) | (lim[b, h] == q_idx)", tensors: {lim: {dims: [b, kv_idx], dtype: int32}}}
  block_ids: {mask: "(q_idx // 4) == ids[h + 1, kv_idx]", tensors: {ids: {dims: [h, q_idx], dtype: int32}}}
  lagging: {mask: q_idx >= kv_idx, score: "score + w[h, q_idx - kv_idx]", tensors: {w: {dims: [h, q_idx], grad: true}}}
  halved: {score: "score + w[b, q_idx // 2] * w[b, kv_idx + 3]", tensors: {w: {dims: [b, kv_idx], grad: true}}}
  moved:
    mask: doc[b, 2 * q_idx] <= doc[b, kv_idx + 1]
    score: score + w[q_idx - 1, b] * w[kv_idx + 3, b]
    tensors: {doc: {dims: [b, kv_idx], dtype: int32}, w: {dims: [q_idx, b], grad: true}}
  nested:
    mask: doc[b, place[q_idx]] <= doc[b, kv_idx]
    score: score + w[b, place[kv_idx]] - u[place[q_idx]] + t[doc[b, kv_idx]]
    tensors:
      doc: {dims: [b, kv_idx], dtype: int32}
      w: {dims: [b, kv_idx], grad: true}
      u: {dims: [q_idx], grad: true}
      t: {dims: [n], grad: true}
      place: {dims: [n], dtype: int32}
  free_dims:
    score: score + w[h, kv_idx] + u[b, q_idx] * t[b, kv_idx] + bias[b, h, q_idx, kv_idx]
    tensors:
      w: {dims: [h, n], grad: true}
      u: {dims: [b, n], grad: true}
      t: {dims: [b, n], grad: true}
      bias: {dims: [b, h, n, n], grad: true}
  crossed: {score: "score + bias[b, h, kv_idx, q_idx]", tensors: {bias: {dims: [b, h, q_idx, kv_idx], grad: true}}}
"""
ENTRIES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(SPEC)["variants"]

TILES = {name: {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1} for name in ("fwd", "dq", "dkdv")}


def of_tokens(dims: Sequence[str | int]) -> bool:
    return any(dim in TOKENS for dim in dims)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The tokens of a sequence along an axis of a tensor: first index, number, and the position of the first token."""

    begin: int
    length: int
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Own:
    """A tensor as an expression reads it: `tensor[i, j]`, with every index clamped to the tensor's size.

    `rows`, for a packed call: the range of the sequence along each dim of tokens; such a tensor has no dim `b`.
    `at_row`, for a call with positions: pairs (position, row); the row is the index along a dim of tokens.
    """

    x: Tensor
    dims: Sequence[str | int]
    rows: Mapping[str, Rows]
    at_row: Sequence[tuple[Tensor, Tensor]] = ()

    def __getitem__(self, indices: Any) -> Tensor:
        given = indices if isinstance(indices, tuple) else (indices,)
        places: list[Tensor] = []
        for index, dim in zip(given, self.dims, strict=True):
            if self.rows and dim == "b" and of_tokens(self.dims):
                continue
            if dim in TOKENS:
                index = next((row for position, row in self.at_row if position is index), index)
            index = torch.as_tensor(index).long()
            if dim in self.rows:
                rows = self.rows[str(dim)]
                assert rows.length, "a sequence without tokens is read by no pair"
                index = rows.begin + (index.clamp(min=0) - rows.first).clamp(0, rows.length - 1)
            places.append(index.clamp(0, self.x.shape[len(places)] - 1))
        element = self.x[tuple(places)]
        return element.long() if element.dtype == torch.int32 else element


def attention(
    entry: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor, names: Mapping[str, Any], may: Tensor | bool = True
) -> tuple[Tensor, Tensor]:
    """o `[H, Sq, D]` and lse of one sequence with at least one key: q `[H, Sq, D]`, k and v `[H, Skv, D]`."""
    score = q @ k.mT / math.sqrt(q.shape[-1])
    keep = (torch.as_tensor(may) & eval(entry.get("mask", "True"), {}, dict(names))).expand(score.shape)
    score = eval(entry.get("score", "score"), {}, {**names, "score": score})
    met = keep.any(-1)
    # A row without a key has no denominator, and no gradient.
    score = torch.where(keep, score, -math.inf).masked_fill(~met[..., None], 0.0)
    probs = torch.where(keep, score.softmax(-1), 0.0)
    return probs @ v, torch.where(met, score.logsumexp(-1), -math.inf)


def results(o: Tensor, lse: Tensor, leaves: Mapping[str, Tensor], weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """o, lse and every gradient. The loss leaves out the lse of rows without a key."""
    loss = (o * weights[0]).sum() + (torch.where(lse.isfinite(), lse, 0.0) * weights[1]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), found, strict=True)]
    return {"o": o, "lse": lse, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, wanted in want.items():
        assert got[name].shape == wanted.shape, name
        found, error = got[name].double(), partial("{}: {}".format, name)
        torch.testing.assert_close(found, wanted.double(), rtol=1e-4, atol=1e-4, msg=error)


def draw(entry: Mapping[str, Any], sizes: Mapping[str, int], *, packed: bool) -> dict[str, Tensor]:
    """The variant's own tensors."""
    own = {}
    for name, declared in entry.get("tensors", {}).items():
        dims = [d for d in declared["dims"] if not (packed and d == "b" and of_tokens(declared["dims"]))]
        shape = [sizes.get(d, FREE) for d in dims]
        if declared.get("dtype") == "bool":
            own[name] = torch.rand(shape) < 0.6
        elif "dtype" in declared:
            own[name] = torch.randint(0, 8, shape, dtype=torch.int32)
        else:
            own[name] = torch.randn(shape, requires_grad=True)
    return own


def doubled(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in leaves.items()}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Lengths of sequences, and the position of the first query of each."""

    q: Sequence[int]
    k: Sequence[int]
    offsets: Sequence[int]


PACKINGS = {
    "mixed": Packing(q=(12, 0, 5, 20, 7), k=(10, 4, 0, 5, 18), offsets=(3, 1, 0, -4, 11)),
    "no_keys_at_the_end": Packing(q=(12, 8), k=(12, 0), offsets=(0, 0)),
    "no_keys": Packing(q=(5, 10), k=(0, 0), offsets=(0, 0)),
    "no_queries": Packing(q=(0, 0), k=(5, 6), offsets=(0, 2)),
}


def check_packed(name: str, op: Any, packing: Packing) -> None:
    """Compare every result of a packed call with those of its sequences alone."""
    torch.manual_seed(0)
    entry, total_q, total_k = ENTRIES[name], sum(packing.q), sum(packing.k)
    sizes = {"b": len(packing.q), "h": HEADS, "hkv": KV_HEADS, "q_idx": total_q, "kv_idx": total_k}
    own = draw(entry, sizes, packed=True)
    shapes = {"q": (total_q, HEADS), "k": (total_k, KV_HEADS), "v": (total_k, KV_HEADS)}
    leaves = {x: torch.randn(*shape, DIM, requires_grad=True) for x, shape in shapes.items()}
    leaves |= {n: x for n, x in own.items() if x.requires_grad}
    begins = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (packing.q, packing.k)]
    weights = torch.randn(total_q, HEADS, DIM), torch.randn(HEADS, total_q)
    o, lse = op(
        *(leaves[x] for x in "qkv"),
        **own,
        cu_seqlens_q=begins[0],
        cu_seqlens_k=begins[1],
        q_offset=torch.tensor(packing.offsets, dtype=torch.int32),
        return_lse=True,
        config=TILES,
    )
    exact = doubled(leaves)
    # Elements that no sequence reads have a gradient of zero.
    parts = [(0 * sum(x.sum() for x in exact.values()) + torch.zeros(0, HEADS, DIM), torch.zeros(HEADS, 0).double())]
    for s, (q_len, kv_len, offset) in enumerate(zip(packing.q, packing.k, packing.offsets, strict=True)):
        q_rows, kv_rows = (
            slice(sum(packing.q[:s]), sum(packing.q[: s + 1])),
            slice(sum(packing.k[:s]), sum(packing.k[: s + 1])),
        )
        rows = {
            "q_idx": Rows(begin=q_rows.start, length=q_len, first=offset),
            "kv_idx": Rows(begin=kv_rows.start, length=kv_len),
        }
        if q_len == 0 or kv_len == 0:
            parts.append((torch.zeros(q_len, HEADS, DIM), torch.full((HEADS, q_len), -math.inf)))
            continue
        names = {n: Own(x=exact.get(n, x), dims=entry["tensors"][n]["dims"], rows=rows) for n, x in own.items()}
        q = exact["q"][q_rows].transpose(0, 1)
        k, v = (exact[x][kv_rows].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for x in "kv")
        found, found_lse = attention(
            entry,
            q,
            k,
            v,
            {
                **names,
                "b": torch.tensor(s),
                "h": torch.arange(HEADS)[:, None, None],
                "q_idx": torch.arange(q_len)[:, None] + offset,
                "kv_idx": torch.arange(kv_len),
            },
        )
        parts.append((found.transpose(0, 1), found_lse))
    want = torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts], 1)
    assert_same(results(o, lse, leaves, weights), results(*want, exact, weights))


def check_positions(name: str, op: Any, q_positions: Tensor, q_ids: Tensor | None = None) -> None:
    """Compare every result of a call that gives positions `[B, S]`, the same for queries and keys."""
    torch.manual_seed(0)
    entry, (batch, length) = ENTRIES[name], q_positions.shape
    sizes = {"b": batch, "h": HEADS, "hkv": KV_HEADS, "q_idx": length, "kv_idx": length}
    own = draw(entry, sizes, packed=False)
    leaves = {
        x: torch.randn(batch, heads, length, DIM, requires_grad=True)
        for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    leaves |= {n: x for n, x in own.items() if x.requires_grad}
    weights = torch.randn(batch, HEADS, length, DIM), torch.randn(batch, HEADS, length)
    ids = {} if q_ids is None else {"q_segment_ids": q_ids}
    given = {**own, **ids, "q_positions": q_positions, "return_lse": True, "config": TILES}
    o, lse = op(*(leaves[x] for x in "qkv"), **given)
    exact, parts = doubled(leaves), []
    for b in range(batch):
        q_idx, kv_idx, row = q_positions[b][:, None].long(), q_positions[b].long(), torch.arange(length)
        at_row = [(q_idx, row[:, None]), (kv_idx, row)]
        names: dict[str, Any] = {
            n: Own(x=exact.get(n, x), dims=entry["tensors"][n]["dims"], rows={}, at_row=at_row) for n, x in own.items()
        }
        names |= {"b": torch.tensor(b), "h": torch.arange(HEADS)[:, None, None], "q_idx": q_idx, "kv_idx": kv_idx}
        k, v = (exact[x][b].repeat_interleave(HEADS // KV_HEADS, 0) for x in "kv")
        may = True if q_ids is None else q_ids[b][:, None] == q_ids[b]
        parts.append(attention(entry, exact["q"][b], k, v, names, may))
    want = torch.stack([part for part, _ in parts]), torch.stack([part for _, part in parts])
    assert_same(results(o, lse, leaves, weights), results(*want, exact, weights))


ASKED = [
    ByRow(in_order=in_order, in_step=in_step, as_rows=as_rows, rule="what a test asks")
    for in_order, in_step, as_rows in product([False, True], repeat=3)
    if in_order or in_step or as_rows
]


def drawn(seed: int) -> dict[str, Tensor]:
    """Ids and positions of a few short batch rows, often in order."""
    torch.manual_seed(seed)
    q_len, kv_len = 4, 4 if seed % 3 else 5
    ids = torch.randint(-1, 2, (64, kv_len)).sort(1)[0] if seed % 2 else torch.randint(0, 2, (64, kv_len))
    starts = torch.cat([torch.ones(64, 1, dtype=torch.bool), ids.diff() != 0], 1)
    rows = torch.arange(kv_len).expand(64, kv_len)
    positions = rows - torch.where(starts, rows, 0).cummax(1)[0]
    positions = torch.where(torch.rand(64, 1) < 0.3, rows, positions)
    kv_positions = torch.where(torch.rand(64, kv_len) < 0.05, positions + 1, positions)
    kv_ids = torch.where(torch.rand(64, kv_len) < 0.05, -1, ids)
    found = {"q_segment_ids": ids[:, :q_len], "kv_segment_ids": kv_ids}
    found |= {"q_positions": positions[:, :q_len], "kv_positions": kv_positions}
    return {name: x.int().contiguous() for name, x in found.items()}
