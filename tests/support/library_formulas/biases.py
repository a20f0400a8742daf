"""Biases of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support.library_formulas.draws import normal, positive
from tests.support.library_formulas.formula import BATCH, HEADS, POSITIONS, Grid, Result, variant


@variant(bias=normal(HEADS, 33))
def shaw_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: max(-16, min(16, j - i)) + 16)]


@variant(bias=normal(HEADS, 2 * POSITIONS + 1), reach=POSITIONS)
def toeplitz_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: j - i + POSITIONS)]


@variant(bias=normal(HEADS, POSITIONS))
def distance_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: abs(i - j))]


def _relative_position_bucket(relative_position: int, *, bidirectional: bool) -> int:
    """As in mesh-tensorflow: 32 buckets, max_distance 128; relative_position = memory position - query position."""
    num_buckets, max_distance, bucket, n = 32, 128, 0, -relative_position
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    max_exact = num_buckets // 2
    if n < max_exact:
        return bucket + n
    large = math.log(n / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    return bucket + min(max_exact + int(large), num_buckets - 1)


@variant(q_len=33, kv_len=200, q_offset=90, bias=normal(HEADS, 32))
def t5_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: _relative_position_bucket(j - i, bidirectional=True))]


@variant(q_len=40, kv_len=140, q_offset=100, bias=normal(HEADS, 32))
def t5_bias_causal(g: Grid) -> Result:
    buckets = g.each(lambda i, j: _relative_position_bucket(j - i, bidirectional=False))
    return g.j <= g.i, g.s + g.own["bias"][:, buckets]


@variant(bias=normal(HEADS, POSITIONS, POSITIONS))
def head_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][None, :, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=normal(POSITIONS, POSITIONS))
def shared_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][None, None, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=normal(BATCH, HEADS, POSITIONS, POSITIONS))
def pair_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, :, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=normal(HEADS, 8), path=lambda: torch.randint(0, 8, (BATCH, POSITIONS, POSITIONS), dtype=torch.int32))
def graphormer(g: Grid) -> Result:
    path = g.own["path"][:, : g.s.shape[2], : g.s.shape[3]].long()
    return None, g.s + torch.stack([g.own["bias"][h][path] for h in range(HEADS)], 1)


@variant(q_offset=25, r1=positive(HEADS), r2=positive(HEADS))
def kerple(g: Grid) -> Result:
    return g.j <= g.i, g.s - g.heads("r1") * torch.log1p(g.heads("r2") * (g.i - g.j).abs())


def _sinusoids(positions: int) -> Tensor:
    """`[positions, 16]`: the embedding of Vaswani et al., 2017, section 3.5."""
    angles = torch.arange(positions)[:, None] / 10000 ** (torch.arange(8) / 8)
    return torch.cat([angles.sin(), angles.cos()], 1)


@variant(
    q_offset=25,
    ratio=lambda: HEADS / (8 * torch.arange(1.0, HEADS + 1)),
    cosines=lambda: (_sinusoids(POSITIONS) @ _sinusoids(1).T).flatten(),
)
def sandwich(g: Grid) -> Result:
    return g.j <= g.i, g.s + g.heads("ratio") * g.own["cosines"][g.each(lambda i, j: abs(i - j))]


@variant(position=normal(BATCH, POSITIONS, 2), reach=positive(HEADS))
def euclidean_decay(g: Grid) -> Result:
    position = g.own["position"]
    places = position[:, g.i.flatten()][:, :, None] - position[:, g.j][:, None]
    return None, g.s * torch.exp(-torch.linalg.vector_norm(places, dim=-1)[:, None] / g.heads("reach"))
