"""Cases of block-sparse attention: how long the blocks are, and what share of them each block of queries has chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases.case import flops
from codegen.testing.golden import Shape

VARIANT = "block_sparse"
"""The variant of these cases, one of `library.yaml`."""

SEQ, HEADS = 16384, 16
DIMS, SIZES, SHARES = (64, 128), (64, 128), (1 / 4, 1 / 16)


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """Each block of `size` queries attends to `kept` blocks of `size` keys, which every head draws anew."""

    shape: Shape
    size: int
    kept: int

    @property
    def name(self) -> str:
        return f"{self.shape} blocks of {self.size}, {self.share:.1%}"

    @property
    def share(self) -> float:
        """The share of all pairs that are chosen."""
        return self.kept * self.size / self.shape.seq

    def flops(self, which: str) -> float:
        """FLOPs of the pass "fwd" or "bwd" for the chosen pairs."""
        pairs = self.shape.seq**2 * self.share
        return flops(which, self.shape.dim, pairs * self.shape.batch * self.shape.heads)


def cases() -> list[SparseCase]:
    """Every head dim with every length of blocks and every share."""
    return [
        SparseCase(
            shape=Shape(batch=1, heads=HEADS, kv_heads=HEADS, seq=SEQ, dim=dim),
            size=size,
            kept=round(share * SEQ / size),
        )
        for dim in DIMS
        for size in SIZES
        for share in SHARES
    ]


def choose(case: SparseCase, device: str) -> Tensor:
    """Random blocks of keys for each block of queries, bool `[B, H, S / size, S / size]`."""
    shape, blocks = case.shape, case.shape.seq // case.size
    chosen = torch.zeros(shape.batch, shape.heads, blocks, blocks, dtype=torch.bool, device=device)
    drawn = torch.rand(chosen.shape, device=device, generator=torch.Generator(device).manual_seed(0))
    return chosen.scatter(3, drawn.topk(case.kept).indices, value=True)
