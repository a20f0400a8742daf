"""The cases of pruned log-decays, and the decays that they have.

The paper (arXiv:2504.06949) reports that about 70 % of the products of trained models are left out, as most heads
forget quickly, and more with longer sequences. So three quarters of the heads here forget within 4 to 256 keys and a
quarter within 1024 to 65536, spaced evenly in the logarithm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from codegen.testing.golden import Shape

PRUNE = 2.0**-24
"""The share of a row's denominator that may be left out: half of float32's eps."""

LOCAL, GLOBAL = (4, 256), (1024, 65536)
"""Number of keys within which a head forgets by a factor e: for the first and the last of the local heads, and for the
first and the last of the others."""

GATE_SPREAD = 0.5
"""Standard deviation of a gate's logit over positions."""

SEQS, HEADS, DIMS = (16384, 65536), ((16, 16), (32, 8)), (64, 128)


def cases() -> list[Shape]:
    """Every length with every number of heads and head_dim."""
    return [
        Shape(batch=1, heads=heads, kv_heads=kv_heads, seq=seq, dim=dim)
        for seq in SEQS
        for heads, kv_heads in HEADS
        for dim in DIMS
    ]


def reaches(heads: int) -> Tensor:
    """Number of keys within which each head forgets by a factor e, float64 `[heads]`."""
    few = 3 * heads // 4
    return torch.cat([_spaced(*LOCAL, few), _spaced(*GLOBAL, heads - few)])


def _spaced(first: int, last: int, count: int) -> Tensor:
    return torch.logspace(math.log2(first), math.log2(last), count, base=2, dtype=torch.float64)


def decays(shape: Shape, device: str) -> Tensor:
    """The log of forget gates, float32 `[B, S, Hq]`: sigmoids of normal numbers about each head's own mean."""
    bias = -torch.log(torch.expm1(1 / reaches(shape.heads)))
    noise = torch.randn(shape.batch, shape.seq, shape.heads, dtype=torch.float64)
    return torch.nn.functional.logsigmoid(GATE_SPREAD * noise + bias).float().to(device)


def share_visited(first: Tensor, seq: int) -> float:
    """The share of a causal mask's pairs whose key is not before the row's first key, `first`, int32 `[B, Hq, S]`."""
    kept = (torch.arange(1, seq + 1, device=first.device) - first).clamp(min=0).sum(dtype=torch.float64)
    return float(kept) / (first.shape[0] * first.shape[1] * seq * (seq + 1) / 2)
