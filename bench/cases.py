"""What is timed: one case is a variant at one size, with the peers that can compute the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.golden import Shape
from bench.mods import MODS

BACKWARD_FLOPS = 2.5
"""Five matrix products in the backward (S again, dP, dV, dK, dQ) to the forward's two."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row pair of the table.

    `own_grads` tells whether the variant's own tensors are trained: peers then compute those gradients as well.
    """

    variant: str
    shape: Shape
    scalars: dict[str, int | float] = field(default_factory=dict)
    own_grads: bool = True
    peers: tuple[str, ...] = ("flex",)

    @property
    def name(self) -> str:
        scalars = ",".join(f"{value}" for value in self.scalars.values())
        return f"{self.variant}{f'({scalars})' if scalars else ''} {self.shape}"

    @property
    def pairs(self) -> int:
        """Unmasked scores of one head of one batch row."""
        return MODS[self.variant].pairs(self.shape.seq, self.scalars)

    def flops(self, which: str) -> float:
        """Work of the "fwd" or "bwd" pass: four times head_dim per unmasked score, and 2.5 times that."""
        forward = 4.0 * self.shape.dim * self.pairs * self.shape.batch * self.shape.heads
        return forward * BACKWARD_FLOPS if which == "bwd" else forward


def _shape(heads: int, kv_heads: int, seq: int, dim: int) -> Shape:
    """As many rows of that length as make 32k tokens, or 16k where there are twice the heads."""
    tokens = 32768 if heads <= 16 else 16384
    return Shape(batch=max(1, tokens // seq), heads=heads, kv_heads=kv_heads, seq=seq, dim=dim)


def issue_cases(seqs: Sequence[int], dims: Sequence[int]) -> list[Case]:
    """The cases of the speed targets, at each length and head_dim; the cheaper variants' at the longest and largest."""
    plain = [
        Case(variant=variant, shape=_shape(*heads, seq, dim), peers=("flex", "fa2", "cudnn"))
        for variant in ("causal", "full")
        for heads in ((16, 16), (32, 8))
        for dim in dims
        for seq in seqs
    ]
    seq, dim = max(seqs), max(dims)
    softcap = [Case(variant="gemma2_local", shape=_shape(16, 16, seq, dim)) for dim in dims]
    shape = _shape(16, 16, seq, dim)
    others = [
        Case(variant="window", shape=shape, scalars={"size": 1024}),
        # Fixed slopes, as they are published; FlexAttention would add up a trained slope's gradient with atomics.
        Case(variant="alibi", shape=shape, own_grads=False),
        Case(variant="gpt_oss", shape=shape),
    ]
    forgetting = [
        Case(variant="forgetting", shape=_shape(heads, kv_heads, seq, dim), peers=("fla",))
        for heads, kv_heads in ((16, 16), (32, 8))
    ]
    return plain + softcap + others + forgetting


def paper_cases(seq: int = 16384, dim: int = 64) -> list[Case]:
    """The variants of the FlexAttention paper (arXiv:2412.05496), four rows of 16 heads, with own heads of k and v and
    with two; and a learned relative bias, whose gradient FlexAttention adds up with atomics."""
    scalars = {"window": {"size": 1024}, "prefix_lm": {"length": 1024}}
    names = ("full", "causal", "alibi", "window", "prefix_lm", "softcap", "document", "natten")
    cases = []
    for kv_heads in (16, 2):
        shape = Shape(batch=4, heads=16, kv_heads=kv_heads, seq=seq, dim=dim)
        cases += [
            Case(variant=name, shape=shape, scalars=dict(scalars.get(name, {})), own_grads=False) for name in names
        ]
        cases.append(Case(variant="relative_bias", shape=shape))
    return cases
