"""What FlashAttention 2 documents that its functions compute, in float64, a row of a batch at a time; its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One sequence: q `[Sq, Hq, D]`, k and v `[Skv, Hkv, D]`, slopes `[Hq]` to o `[Sq, Hq, D]` and lse `[Hq, Sq]`.

    `kept` `[Hq, Sq, Skv]` are the probabilities that dropout leaves.
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (rows - columns).abs()
    left, right = window_size
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen &= (columns <= rows) if causal else (columns <= rows + right) if right >= 0 else seen
    seen &= (columns >= rows - left) if left >= 0 else seen
    scores = scores.masked_fill(~seen, -float("inf"))
    lse = scores.logsumexp(-1)
    empty = ~seen.any(-1)
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    return (weights @ v).transpose(0, 1), lse.masked_fill(empty, float("inf"))


def batched(q: Tensor, k: Tensor, v: Tensor, *, slopes: Tensor | None = None, **call: Any) -> tuple[Tensor, Tensor]:
    """The same of `[B, S, H, D]`, slopes `[H]` or `[B, H]`: o `[B, Sq, Hq, D]` and lse `[B, Hq, Sq]`."""
    rows = [None if slopes is None else slopes.expand(q.shape[0], -1)[b] for b in range(q.shape[0])]
    found = [reference(q[b], k[b], v[b], slopes=rows[b], **call) for b in range(q.shape[0])]
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])


def packed(
    *inputs: Any, begins: tuple[list[int], list[int]], slopes: Tensor | None = None, **call: Any
) -> tuple[Tensor, Tensor]:
    """The same of q, k and v `[total, H, D]`, slopes `[H]` or `[n, H]`: o `[total_q, Hq, D]` and lse `[Hq, total_q]`.

    `begins`: where the sequences of q, and of k and v, begin.
    """
    q, k, v = inputs
    found = []
    for s in range(len(begins[0]) - 1):
        rows, keys = (slice(*each[s : s + 2]) for each in begins)
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[s]
        found.append(reference(q[rows], k[keys], v[keys], slopes=own, **call))
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)


def drawn(*shape: int) -> Tensor:
    """Random numbers whose products reach a softcap, as a parameter."""
    return (torch.randn(*shape) * 1.5).requires_grad_()


def qkv(rows: int = 9, keys: int = 13, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(rows * 100 + keys)
    return drawn(batch, rows, heads, 16), drawn(batch, keys, kv_heads, 16), drawn(batch, keys, kv_heads, 16)
