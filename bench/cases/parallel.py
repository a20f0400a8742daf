"""The cases of the parallel suite, the most important first, so that a short run drops the least.

Rows are those of a long training sequence: one batch row, 32 query heads on 8 key heads of 128 channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bench.cases.case import flops
from bench.cases.packed import random_lengths

HEADS, KV_HEADS, DIM = 32, 8, 128
DOCUMENTS = 12
MEDIAN, SIGMA = 2048, 1.0
"""Lognormal document lengths: their median, and the standard deviation of their logarithm."""

PARTS = ("links", "exact", "ours", "peers", "jax")
TORCH_PEERS = ("cp-cudnn", "cp-flash", "cp-flex")
JAX_PEERS = ("kvax",)
PEERS = (*TORCH_PEERS, *JAX_PEERS)

WINDOWS = {"gpt_oss": 128}
"""Keys that a query sees under a variant whose window is part of its mask."""

EXACT_SEQ = 4096
"""Rows of a call that is compared with a float32 reference, which holds all scores at once."""

ASSUMED_FLOPS = 450e12
"""Floating-point operations per second that the estimates of a job's time assume."""


@dataclass(frozen=True, kw_only=True)
class ParallelCase:
    """One variant on a sequence that several GPUs share. `documents` has the lengths of packed sequences, if any."""

    label: str
    seq: int
    variant: str = "causal"
    documents: tuple[int, ...] = ()
    scalars: tuple[tuple[str, int], ...] = ()
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    dim: int = DIM

    def __str__(self) -> str:
        return f"{self.label} S{self.seq}"

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where packed sequences begin, and the end of the last; empty for dense rows."""
        return (0, *np.cumsum(self.documents).tolist()) if self.documents else ()

    @property
    def pairs(self) -> int:
        """Unmasked scores of one head."""
        window = dict(self.scalars).get("size", WINDOWS.get(self.variant))
        total = 0
        for length in self.documents or (self.seq,):
            total += length * (length + 1) // 2
            if window is not None and length > window:
                total -= (length - window) * (length - window + 1) // 2
        return total

    def flops(self, which: str) -> float:
        """Floating-point operations on unmasked scores of the pass "fwd" or "fwd+bwd"."""
        return sum(flops(each, self.dim, self.heads[0] * self.pairs) for each in which.split("+"))

    def small(self) -> ParallelCase:
        """The case shrunk to `EXACT_SEQ` rows, for a comparison with float32."""
        if self.seq <= EXACT_SEQ:
            return self
        ends = [end * EXACT_SEQ // self.seq for end in self.cu_seqlens]
        documents = tuple(end - begin for begin, end in itertools.pairwise(ends))
        return replace(self, seq=EXACT_SEQ, documents=documents)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A unit of measurement: a `part` of the suite on one case, with some implementations (none: all that there are).

    `seconds` is an estimate, by which a run decides whether there is time for the job.
    """

    part: str
    case: ParallelCase | None = None
    implementations: tuple[str, ...] = ()
    ranks: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The job's name in a run, with its implementations, since one part of a case may be several jobs."""
        words = [self.part, *([str(self.case)] if self.case else []), *self.implementations]
        return " ".join([*words, *([f"P{self.ranks}"] if self.ranks else [])])


def lognormal_lengths(total: int) -> tuple[int, ...]:
    """Document lengths that sum to `total`; the last one is cut there."""
    generator = np.random.default_rng(0)
    found: list[int] = []
    while sum(found) < total:
        length = max(1, round(math.exp(generator.normal(math.log(min(MEDIAN, total // 4)), SIGMA))))
        found.append(min(length, total - sum(found)))
    return tuple(found)


def causal(seq: int) -> ParallelCase:
    return ParallelCase(label="causal", seq=seq)


def documents(seq: int) -> ParallelCase:
    return ParallelCase(label=f"{DOCUMENTS} documents", seq=seq, documents=random_lengths(seq, DOCUMENTS))


def lognormal(seq: int) -> ParallelCase:
    return ParallelCase(label="lognormal documents", seq=seq, documents=lognormal_lengths(seq))


def window(seq: int, size: int = 1024) -> ParallelCase:
    return ParallelCase(label=f"window({size})", variant="window", seq=seq, scalars=(("size", size),))


def other(variant: str, seq: int) -> ParallelCase:
    return ParallelCase(label=variant, variant=variant, seq=seq)


def tiny(case: ParallelCase) -> ParallelCase:
    """A case of the same kind with some hundred rows, to run the suite on a CPU."""
    seq = max(32, case.seq // 512)
    documents = lognormal_lengths(seq) if case.documents else ()
    scalars = tuple((name, max(1, value // 64)) for name, value in case.scalars)
    return replace(case, seq=seq, documents=documents, scalars=scalars, heads=(4, 2), dim=16)


def jobs(ranks: int, *, is_tiny: bool = False) -> list[Job]:
    """Everything that the ranks of one run measure in torch, in order."""
    long, middle, short = 131072, 32768, 16384
    found = [
        Job(part="links"),
        Job(part="exact", case=causal(long)),
        Job(part="ours", case=causal(long)),
        Job(part="ours", case=causal(middle)),
        Job(part="ours", case=causal(short)),
        Job(part="exact", case=documents(long)),
        *(Job(part="ours", case=case(seq)) for case in (documents, lognormal) for seq in (long, middle)),
        *(
            Job(part="peers", case=causal(seq), implementations=(peer,))
            for seq in (long, middle)
            for peer in ("cp-cudnn", "cp-flash")
        ),
        *(Job(part="peers", case=documents(seq), implementations=("cp-flex",)) for seq in (middle, long)),
    ]
    for case in (window(long), other("forgetting", long), other("gpt_oss", long)):
        found += [Job(part="exact", case=case), Job(part="ours", case=case)]
    found += [
        Job(part="peers", case=lognormal(long), implementations=("cp-flex",)),
        Job(part="peers", case=causal(short), implementations=("cp-cudnn",)),
        Job(part="ours", case=causal(4 * long), implementations=("auto", "gather")),
    ]
    return [_estimated(job, ranks, is_tiny=is_tiny) for job in found]


def replays(sizes: Sequence[int], *, is_tiny: bool = False) -> list[Job]:
    """For each size, the local work of every one of so many ranks, one rank after the other on one GPU."""
    long = 131072
    found = []
    for ranks in sizes:
        seq = 4 * long if ranks > 8 else long
        cases = [documents(seq), lognormal(seq), causal(seq)]
        if ranks <= 8:
            cases += [window(seq), other("forgetting", seq)]
        found += [Job(part="replay", case=case, ranks=ranks) for case in cases]
    return [_estimated(job, 1, is_tiny=is_tiny) for job in found]


def _estimated(job: Job, ranks: int, *, is_tiny: bool) -> Job:
    """The job with an estimate of its seconds: compiling, and every implementation some times in both passes."""
    if is_tiny:
        return replace(job, case=None if job.case is None else tiny(job.case))
    if job.case is None:
        return replace(job, seconds=10.0)
    if job.part == "exact":
        return replace(job, seconds=15.0)
    one = job.case.flops("fwd+bwd") * 1.3 / ASSUMED_FLOPS
    repeats = 4 if one < 5 else 3
    if job.part == "replay":
        return replace(job, seconds=10 + one * 3 * 4)
    if job.part == "peers":
        compiling = 45 if "cp-flex" in job.implementations else 8
        return replace(job, seconds=compiling + 1.5 * one * repeats / ranks + one)
    count = len(job.implementations) or 4
    return replace(job, seconds=8 + one * repeats * (1 + count / ranks))
