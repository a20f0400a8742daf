"""The cases of the packed suite: documents of unequal lengths in one call.

The sizes are those of Kvax's benchmark (github.com/nebius/kvax): 131072 tokens, 12 documents in each row, of lengths
that scatter a little around the mean, causal inside documents, 32 query heads on 8 key heads of 128 channels.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.cases.case import flops
from codegen.testing.golden import Shape

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = 131072
SEQS = (4096, 16384, 65536)
DOCUMENTS = 12
DENSE_SEQ = 16384
LONG, SHORT = 65536, 64
CHECK_TOKENS = 2048

OURS = ("packed", "segments", "dense")
"""Our implementations; all others are peers."""


def random_lengths(total: int, documents: int) -> tuple[int, ...]:
    """Document lengths that sum to `total`, drawn as by Kvax: one token each, the rest one by one at random."""
    rng = random.Random(0)
    counts = Counter(rng.randint(0, documents - 1) for _ in range(total - documents))
    return tuple(1 + counts[i] for i in range(documents))


@dataclass(frozen=True, kw_only=True)
class PackedCase:
    """One variant on packed documents: `rows` has the document lengths of each batch row; all rows are equally long."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    implementations: tuple[str, ...]
    variant: str = "causal"
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    dim: int = DIM

    @property
    def shape(self) -> Shape:
        """The shape of the dense batch."""
        heads, kv_heads = self.heads
        return Shape(batch=len(self.rows), heads=heads, kv_heads=kv_heads, seq=sum(self.rows[0]), dim=self.dim)

    def flops(self, which: str) -> float:
        """Work of the "fwd" or "bwd" pass on unmasked scores alone."""
        pairs = sum(length * (length + 1) // 2 for row in self.rows for length in row)
        return flops(which, self.dim, pairs * self.heads[0])

    def small(self) -> PackedCase:
        """The case shrunk to `CHECK_TOKENS`, for comparison with float64; documents may become empty."""
        rows = self.rows[:2]
        each = CHECK_TOKENS // len(rows)
        return replace(self, name="", rows=tuple(_shrunk(row, each) for row in rows))


def _shrunk(row: Sequence[int], total: int) -> tuple[int, ...]:
    ends = [0, *(end * total // sum(row) for end in itertools.accumulate(row))]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def cases() -> list[PackedCase]:
    """Kvax's documents, with and without a log-decay; dense rows; equal documents; one long among short documents."""
    rows = {seq: (random_lengths(seq, DOCUMENTS),) * (TOKENS // seq) for seq in SEQS}
    documents = [
        PackedCase(
            name=f"documents B{TOKENS // seq} S{seq}",
            rows=rows[seq],
            implementations=("packed", "segments", "fa4", "flex"),
        )
        for seq in SEQS
    ]
    forgetting = [
        PackedCase(
            name=f"forgetting B{TOKENS // seq} S{seq}",
            rows=rows[seq],
            implementations=("packed", "fla"),
            variant="forgetting",
        )
        for seq in SEQS
    ]
    dense = [
        PackedCase(name=f"dense B{TOKENS // seq} S{seq}", rows=((seq,),) * (TOKENS // seq), implementations=("dense",))
        for seq in (DENSE_SEQ, LONG)
    ]
    uniform = [
        PackedCase(name=f"uniform {length}", rows=((length,) * (TOKENS // length),), implementations=("packed", "fa4"))
        for length in (1024, 2048, 4096)
    ]
    short = (SHORT,) * ((TOKENS - LONG) // SHORT)
    long = [
        PackedCase(
            name=f"{LONG} then {len(short)} x {SHORT}", rows=((LONG, *short),), implementations=("packed", "fa4")
        ),
        PackedCase(
            name=f"{len(short)} x {SHORT} then {LONG}", rows=((*short, LONG),), implementations=("packed", "fa4")
        ),
    ]
    return [*documents, *forgetting, *dense, *uniform, *long]


FRONT_ROW = 8192
SHORT_LENGTHS = (64, 1024)


def front_cases() -> list[PackedCase]:
    """Cases of the suite `front`: 12 documents a row, many short ones, and a long one alone and among short ones."""
    known = cases()
    documents = [case for case in known if case.name.startswith("documents")]
    uneven = [case for case in known if len(case.rows) == 1 and len(set(case.rows[0])) > 1]
    dense = [case for case in known if case.name.startswith("dense") and case.shape.seq == LONG]
    rng = random.Random(0)
    short = PackedCase(
        name=f"short documents B{TOKENS // FRONT_ROW} S{FRONT_ROW}",
        rows=tuple(_short_lengths(FRONT_ROW, rng) for _ in range(TOKENS // FRONT_ROW)),
        implementations=("packed", "segments", "fa4", "flex"),
    )
    return [*documents, short, *dense, *uneven]


def _short_lengths(total: int, rng: random.Random) -> tuple[int, ...]:
    """Lengths that sum to `total`, each within SHORT_LENGTHS: the last takes what the others leave."""
    low, high = SHORT_LENGTHS
    lengths: list[int] = []
    while (left := total - sum(lengths)) > high:
        lengths.append(rng.randint(low, min(high, left - low)))
    return (*lengths, left)


def with_peers(case: PackedCase, wanted: Sequence[str] | None, absent: Iterable[str]) -> PackedCase:
    """The case with our implementations, and those of its peers that are `wanted` (None: all) and not `absent`."""
    peers = set(case.implementations if wanted is None else wanted) - set(absent)
    return replace(case, implementations=tuple(name for name in case.implementations if name in {*OURS, *peers}))
