"""The cases of the decode suite: few queries on long caches in pages, in the shapes that servers meet."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

HEADS, KV_HEADS, DIM = 32, 8, 128
MIXED = (1024, 16384)
OURS = ("codegen", "contiguous", "balanced")
"""Our implementations: on pages; with a page for each sequence; splits that balance a batch. All others are peers."""

PEERS = ("flashinfer", "fa3", "sdpa")


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One step: `lengths` has the keys of each sequence, `queries` how many of its last tokens are asked about."""

    name: str
    lengths: tuple[int, ...]
    implementations: tuple[str, ...] = ("codegen",)
    variant: str = "causal"
    page_size: int = 64
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    queries: int = 1
    dim: int = DIM

    def small(self) -> DecodeCase:
        """The case with two of its sequences, cut to 2000 keys, for comparison with float64."""
        cut = tuple(min(length, 2000 - 700 * number) for number, length in enumerate(self.lengths[:2]))
        return replace(self, lengths=cut)


def mixed_lengths(sequences: int = 64) -> tuple[int, ...]:
    """Lengths drawn evenly between the ends of MIXED."""
    rng = random.Random(1)
    return tuple(rng.randint(*MIXED) for _ in range(sequences))


def cases(variants: Iterable[str]) -> list[DecodeCase]:
    """Every case; `variants` are those that have kernels on pages."""
    mixed, both = mixed_lengths(), ("codegen", "contiguous")
    found = [
        _causal("B1 S131072", (131072,), (*both, *PEERS)),
        _causal("B1 S32768", (32768,), ("codegen", *PEERS)),
        *(_causal(f"B1 S{seq}", (seq,), ("codegen", *PEERS)) for seq in (8192, 4096, 1024)),
        _causal("B16 S8192", (8192,) * 16, (*both, *PEERS)),
        _causal("B64 S8192", (8192,) * 64, (*both, *PEERS)),
        _causal("B256 S1024", (1024,) * 256, ("codegen", *PEERS)),
        *(
            replace(
                _causal(
                    f"B64 mixed page {page}",
                    mixed,
                    ("codegen", *(("balanced", "flashinfer", "fa3") if page == 16 else ())),
                ),
                page_size=page,
            )
            for page in (16, 1, 64, 256)
        ),
        _causal("B64 mixed contiguous", mixed, ("contiguous",)),
        *(
            replace(_causal(f"B16 S8192 H{8 * group}/8", (8192,) * 16, ("codegen", "flashinfer")), heads=8 * group)
            for group in (1, 3, 5, 7, 8, 16)
        ),
        *(
            replace(_causal(f"B16 S8192 {queries} queries", (8192,) * 16, ("codegen",)), queries=queries)
            for queries in (4, 8)
        ),
    ]
    every = [
        DecodeCase(name=f"B64 S8192 {variant}", lengths=(8192,) * 64, variant=variant)
        for variant in variants
        if variant != "causal"
    ]
    return [*found, *every]


def _causal(name: str, lengths: tuple[int, ...], implementations: tuple[str, ...]) -> DecodeCase:
    return DecodeCase(name=name, lengths=lengths, implementations=implementations)


def with_peers(case: DecodeCase, wanted: Sequence[str] | None, absent: Iterable[str]) -> DecodeCase:
    """The case with our implementations, and those of its peers that are `wanted` (None: all) and not `absent`."""
    peers = set(case.implementations if wanted is None else wanted) - set(absent)
    return replace(case, implementations=tuple(name for name in case.implementations if name in {*OURS, *peers}))
