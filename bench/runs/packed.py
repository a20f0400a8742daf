"""The packed suite: documents of unequal lengths in one call, ours beside FlexAttention, FlashAttention-4 and FLA."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.cases.packed import DENSE_SEQ, DIM, HEADS, KV_HEADS, LONG, OURS, TOKENS, PackedCase
from bench.peers.packed_peers import BUILDERS, draw, fault
from bench.record import in_one_line
from bench.timing.clock import Clock
from bench.timing.warm_compile import compile_in_parallel
from codegen.testing.golden import Inputs

DENSE_SHARE = 0.85
"""Share of the dense causal rate, per unmasked score, that documents of 1000 tokens and more must reach."""

LONG_SHARE = 0.9
"""Share of the rate of dense calls of that length that one long sequence among short ones must reach."""

KVAX_BLOCK = 128
"""Kvax keeps four int32 bounds per block of each row, for each of three passes."""

MOST_JOBS = 3
"""Processes that compile at once: each holds a case's tensors, up to 16 GiB, on the same GPU."""


@dataclass(frozen=True, kw_only=True)
class PackedMeasurement:
    """One implementation of a case: milliseconds and TFLOP/s of unmasked scores by pass, and bytes of its schedule."""

    case: str
    implementation: str
    ms: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    schedule_bytes: int | None = None
    note: str = ""


def _median_ms(call: Callable[[], Any], rep_ms: int) -> float:
    from triton.testing import do_bench  # where there is a GPU

    ms: float = do_bench(call, warmup=10, rep=rep_ms, return_mode="median")
    return ms


def measure(case: PackedCase, rep_ms: int, device: str = "cuda") -> Iterator[PackedMeasurement]:
    """Check each implementation of a case against float64, then time it."""
    inputs = draw(case, device)
    for name in case.implementations:
        try:
            if wrong := fault(replace(case.small(), implementations=()), name, device):
                yield PackedMeasurement(case=case.name, implementation=name, note=wrong)
            else:
                yield _timed(case, name, inputs, rep_ms)
        except Exception as error:  # a peer may be missing or fail in any way; its row says so
            yield PackedMeasurement(case=case.name, implementation=name, note=in_one_line(error))


def _timed(case: PackedCase, name: str, inputs: Inputs, rep_ms: int) -> PackedMeasurement:
    built = BUILDERS[name](case, inputs)
    o = built.runner.forward()
    passes = {"fwd": built.runner.forward, "bwd": lambda: built.runner.gradients(o)}
    ms = {which: _median_ms(call, rep_ms) for which, call in passes.items()}
    tflops = {which: case.flops(which) / ms[which] / 1e9 for which in passes}
    nbytes = None
    if built.schedule is not None and built.unscheduled is not None:
        ms["schedule"] = _median_ms(built.schedule, rep_ms)
        ms["unscheduled"] = _median_ms(built.unscheduled, rep_ms)
        nbytes = built.schedule().nbytes
    return PackedMeasurement(case=case.name, implementation=name, ms=ms, tflops=tflops, schedule_bytes=nbytes)


def rehearsals(chosen: Sequence[PackedCase]) -> list[PackedCase]:
    """Each implementation of each case by itself.

    FlexAttention, whose compiler takes the longest, comes last: a run that is short of time has compiled the others.
    """
    alone = [replace(case, implementations=(name,)) for case in chosen for name in case.implementations]
    return sorted(alone, key=lambda case: "flex" in case.implementations)


def rehearse(case: PackedCase) -> None:
    """Run everything that the case will run, once, to fill the compilers' caches on disk."""
    inputs = draw(case, "cuda")
    for name in case.implementations:
        # A failure here happens again in `measure`, which reports it.
        with contextlib.suppress(Exception):
            fault(replace(case.small(), implementations=()), name, "cuda")
            BUILDERS[name](case, inputs).results()


def table(measurements: Sequence[PackedMeasurement], chosen: Sequence[PackedCase]) -> str:
    """One line per case and implementation; `no schedule` times a forward that makes its own schedule."""
    kvax = {case.name: 3 * len(case.rows) * -(-case.shape.seq // KVAX_BLOCK) * 16 for case in chosen}
    width = max(len(m.case) for m in measurements)
    lines = [
        f"{'case':{width}} {'by':8} | {'fwd ms':>8} {'TF':>4} | {'bwd ms':>8} {'TF':>4} |"
        f" {'no schedule':>11} {'schedule ms':>11} {'KiB':>8} {'Kvax KiB':>8}"
    ]
    for m in measurements:
        passes = " | ".join(f"{_cell(m.ms.get(p), 8, 3)} {_cell(m.tflops.get(p), 4, 0)}" for p in ("fwd", "bwd"))
        size = None if m.schedule_bytes is None else m.schedule_bytes / 1024
        theirs = kvax[m.case] / 1024 if m.implementation == "segments" and m.case in kvax else None
        lines.append(
            f"{m.case:{width}} {m.implementation:8} | {passes} | {_cell(m.ms.get('unscheduled'), 11, 3)}"
            f" {_cell(m.ms.get('schedule'), 11, 3)} {_cell(size, 8, 1)} {_cell(theirs, 8, 1)}"
        )
    notes = [f"  {m.case} {m.implementation}: {m.note}" for m in measurements if m.note]
    return "\n".join([*lines, *(["", "not measured, or wrong:", *notes] if notes else [])])


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def dense_shares(measurements: Sequence[PackedMeasurement]) -> Iterator[tuple[str, str, float, float]]:
    """Case, pass, share of the dense causal rate, and the share that is needed.

    For rows of equally long documents, and for one long sequence among short ones.
    """
    dense = {int(m.case.rpartition("S")[2]): m.tflops for m in measurements if m.implementation == "dense"}
    for m in measurements:
        if m.implementation not in OURS:
            continue
        if m.case.startswith("uniform"):
            rates, needed = dense.get(DENSE_SEQ, {}), DENSE_SHARE
        elif " x " in m.case:
            rates, needed = dense.get(LONG, {}), LONG_SHARE
        else:
            continue
        yield from ((m.case, which, m.tflops[which] / rates[which], needed) for which in m.tflops if which in rates)


def run(
    rep_ms: int,
    jobs: int,
    chosen: Sequence[PackedCase],
    keep: Callable[[Sequence[PackedMeasurement]], None],
    clock: Clock,
) -> bool:
    """Measure, call `keep` after each case, and print the tables. True if ours is right and fast enough."""
    start = time.perf_counter()
    if jobs > 0:
        compile_in_parallel(rehearse, rehearsals(chosen), min(jobs, MOST_JOBS), clock.at(0.5), "packed: compiling")
    measurements: list[PackedMeasurement] = []
    for number, case in enumerate(chosen, start=1):
        if clock.over:
            print(f"out of time: skipped {', '.join(each.name for each in chosen[number - 1 :])}", flush=True)
            break
        print(f"[{number}/{len(chosen)}] {case.name}", flush=True)
        measurements += measure(case, rep_ms)
        keep(measurements)
    if not measurements:
        return True
    print(f"\ndocuments, bfloat16, H{HEADS}/{KV_HEADS} D{DIM}, {TOKENS} tokens; TF: TFLOP/s of unmasked scores\n")
    print(table(measurements, chosen))
    right = not any(m.note for m in measurements if m.implementation in OURS)
    for name, which, share, needed in dense_shares(measurements):
        kept = share >= needed
        right &= kept
        print(f"  {name} {which}: {share:.0%} of the dense rate, bar {needed:.0%}: {'OK' if kept else 'TOO SLOW'}")
    print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return right
