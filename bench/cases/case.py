"""A benchmark case: one variant at one size, and the peers it is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bench.cases.flex_mods import MODS
from bench.cases.pairs import count
from bench.record import TITLES
from codegen.testing.golden import Shape

NO_FLEX = ("causal_dropout", "forgetting")
"""Variants in `flex_mods` that FlexAttention cannot express: dropout, and a log-decay summed along the sequence."""

SDPA = ("causal", "full")
FA4 = (*SDPA, "window", "softcap", "gemma2_local")
FLA = ("causal", "forgetting")


def flops(which: str, dim: int, pairs: float, dim_v: int | None = None) -> float:
    """FLOPs of the matrix products of the pass "fwd" or "bwd", from the number of unmasked scores of all heads.

    The backward has five products: S again, dK and dQ of `dim` columns, and dP and dV of `dim_v`, by default `dim`.

    >>> flops("fwd", 64, 1.0), flops("bwd", 64, 1.0), flops("bwd", 192, 1.0, 128)
    (256.0, 640.0, 1664.0)
    """
    products = (3, 2) if which == "bwd" else (1, 1)
    return 2.0 * pairs * (products[0] * dim + products[1] * (dim if dim_v is None else dim_v))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case, which is one row in each of the tables for forward and backward.

    `own_grads`: whether the variant's own tensors need gradients, for us and for the peers.
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
    def pairs(self) -> float:
        """Unmasked scores of one head, averaged over the batch rows."""
        mods = MODS.get(self.variant)
        if mods is None:
            return count(self.variant, self.shape.seq, self.shape.batch, self.scalars)
        return mods.pairs(self.shape.seq, self.scalars)

    def flops(self, which: str) -> float:
        """FLOPs of the "fwd" or "bwd" pass."""
        return flops(which, self.shape.dim, self.pairs * self.shape.batch * self.shape.heads, self.shape.head_dim_v)


def able(case: Case) -> tuple[str, ...]:
    """The peers that can compute a case."""
    grouped = case.shape.heads != case.shape.kv_heads
    knows = {
        "flex": case.variant in MODS and case.variant not in NO_FLEX,
        "fa2": case.variant in SDPA,
        "efficient": case.variant in SDPA and not grouped,
        "fa4": case.variant in FA4,
        "fla": case.variant in FLA,
    }
    knows |= {"flex-max": knows["flex"], "cudnn": knows["fa2"]}
    return tuple(peer for peer in TITLES if knows.get(peer))


def with_peers(case: Case, wanted: Sequence[str] | None, absent: Iterable[str] = ()) -> Case:
    """The case with the `wanted` peers that can compute it (None: its own peers), without the `absent` ones."""
    peers = case.peers if wanted is None else tuple(peer for peer in able(case) if peer in wanted)
    return replace(case, peers=tuple(peer for peer in peers if peer not in set(absent)))


def narrowed(case: Case, wanted: Sequence[str] | None) -> Case:
    """The case with those of its own peers that are `wanted` (None: all)."""
    return case if wanted is None else replace(case, peers=tuple(peer for peer in case.peers if peer in wanted))


def merged(cases: Iterable[Case]) -> list[Case]:
    """Each case once, in order of first occurrence, with the peers of all its occurrences."""
    found: dict[str, Case] = {}
    for case in cases:
        known = found.get(case.name)
        peers = set(case.peers) | set(known.peers if known else ())
        found[case.name] = replace(known or case, peers=tuple(peer for peer in TITLES if peer in peers))
    return list(found.values())
