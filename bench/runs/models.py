"""The suite `models`: tokens per second and peak memory of training steps, and the CPU time of a call of attention."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from bench.cases.models import OURS, ModelCase
from bench.peers.model_peers import CLOCK, LEFT_OUT, OP_ALONE, TorchTrainee, Trainee, attention_calls
from bench.record import in_one_line
from bench.timing.clock import Clock
from bench.timing.measure import GpuLostError

WARM_UP, ROUNDS = 2, 5
"""Steps before the clock starts; rounds, in which implementations take turns."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Seconds of each implementation in a round, and the number of forward passes for the median CPU time of a call."""

    round_s: float = 0.4
    passes: int = 30


QUICK = Effort(round_s=0.02, passes=2)

SAME_LOSS = 0.02
"""Largest difference between our first loss and the median of the others, as a share of it."""

OUT_OF_MEMORY = "out of memory"
_SIGNS = (OUT_OF_MEMORY, "RESOURCE_EXHAUSTED", "can't allocate memory")


@dataclass(kw_only=True)
class ModelMeasurement:
    """One implementation of a case.

    `ms`: a training step, the median of rounds. `spread`: the range of the rounds divided by their median. `peak_gib`:
    peak memory of a step. `host_us`: CPU time of one call of attention. `note`: why it was not measured, or what is
    wrong.
    """

    case: str
    implementation: str
    ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    spread: float | None = None
    loss: float | None = None
    host_us: float | None = None
    note: str = ""
    rounds: list[float] = field(default_factory=list)


def measure(
    case: ModelCase,
    device: str,
    effort: Effort,
    make: Callable[[ModelCase, str], Trainee] | None = None,
) -> list[ModelMeasurement]:
    """Time the training steps of a case, implementations in turn. The row of an implementation that fails says why.

    Raises:
        GpuLostError: no kernel can run in this process any more; `rows` are empty.
    """
    rows = [ModelMeasurement(case=case.name, implementation=name) for name in case.implementations]
    try:
        trainee = (make or _trainee)(case, device)
    except Exception as error:  # every way in which a model may not fit or a library may refuse it
        reason = said(error)
        for row in rows:
            row.note = reason
    else:
        _take_turns(trainee, rows, effort)
        del trainee
    _free(device)
    for row in rows:
        _summarise(row, case)
    _judge(rows)
    return rows


def _trainee(case: ModelCase, device: str) -> Trainee:
    if case.architecture == "Flax":
        from bench.peers.flax_models import FlaxTrainee

        return FlaxTrainee(case, device)
    return TorchTrainee(case, device)


def _take_turns(trainee: Trainee, rows: Sequence[ModelMeasurement], effort: Effort) -> None:
    counts: dict[str, int] = {}
    for row in rows:
        _guarded(trainee, row, partial(_warm_up, trainee, row, counts, effort))
    for number in range(ROUNDS):
        first = number % max(1, len(rows))
        for row in (*rows[first:], *rows[:first]):
            if not row.note:
                _guarded(trainee, row, partial(_round, trainee, row, counts[row.implementation]))


def _guarded(trainee: Trainee, row: ModelMeasurement, act: Callable[[], None]) -> None:
    """Run a part of a measurement. If it fails, the row says why, and the memory that it held is freed."""
    try:
        act()
        return
    except Exception as error:  # a peer may fail in any way; its row says so
        row.note = said(error)
    trainee.release()
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except Exception as lost:
        raise GpuLostError(f"{row.case}, {row.implementation}: {row.note}", []) from lost


def _warm_up(trainee: Trainee, row: ModelMeasurement, counts: dict[str, int], effort: Effort) -> None:
    """Compile, read loss and memory, and count the steps of a round."""
    step = trainee.use(row.implementation)
    row.loss = trainee.wait(step())
    for _ in range(WARM_UP - 1):
        trainee.wait(step())
    row.peak_gib = trainee.peak_gib(step)
    begin = time.perf_counter()
    trainee.wait(step())
    counts[row.implementation] = max(1, round(effort.round_s / (time.perf_counter() - begin)))


def _round(trainee: Trainee, row: ModelMeasurement, count: int) -> None:
    step = trainee.use(row.implementation)
    # One step that is not timed, because the previous implementation has filled the caches with its own data.
    trainee.wait(step())
    begin = time.perf_counter()
    for _ in range(count):
        loss = step()
    trainee.wait(loss)
    row.rounds.append((time.perf_counter() - begin) / count * 1e3)


def _summarise(row: ModelMeasurement, case: ModelCase) -> None:
    if row.rounds and not row.note:
        row.ms = statistics.median(row.rounds)
        row.spread = (max(row.rounds) - min(row.rounds)) / row.ms
        row.tokens_per_s = case.tokens / row.ms * 1e3


def _judge(rows: Sequence[ModelMeasurement]) -> None:
    """Mark our row as wrong if its first loss differs from the median of the others by more than SAME_LOSS."""
    others = [row.loss for row in rows if row.implementation != OURS and row.loss is not None]
    for row in rows:
        if row.implementation == OURS and row.loss is not None and others:
            beside = statistics.median(others)
            if not abs(row.loss - beside) <= SAME_LOSS * abs(beside):
                row.note = f"WRONG: a first loss of {row.loss:.4f}, where others have {beside:.4f}"


def said(error: BaseException) -> str:
    """An error in one line. A device out of memory gives the same words whatever library reports it."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _SIGNS):
        return OUT_OF_MEMORY
    return in_one_line(error)


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def host_rows(device: str, effort: Effort) -> list[ModelMeasurement]:
    """CPU microseconds of one call of attention with autograd, on 128 tokens, so few that the CPU never waits.

    Implementations take turns, forward by forward, so that other load on the CPU affects all of them alike.
    """
    rows: list[ModelMeasurement] = []
    for documents in (False, True):
        case = "CPU time of a call" + (", two documents" if documents else "")
        calls = attention_calls(device, documents=documents)
        own = {name: ModelMeasurement(case=case, implementation=name) for name in calls}
        for number in range(effort.passes + HOST_WARM_UP):
            for name, (forward, seconds) in calls.items():
                if own[name].note:
                    continue
                if number == HOST_WARM_UP:
                    seconds.clear()
                try:
                    forward()
                    if device == "cuda":
                        torch.cuda.synchronize()
                except Exception as error:  # as above
                    own[name].note = said(error)
        for name, (_, seconds) in calls.items():
            if not own[name].note:
                own[name].host_us = statistics.median(seconds) * 1e6
        rows += own.values()
    return rows


HOST_WARM_UP = 3
"""Forwards before the clock starts: of several alike calls of the op, the third is the first that is replayed."""

PYTHON_US = 15.0
"""Target: microseconds of Python in a layer beside the op's own call."""


def python_of_a_layer(rows: Sequence[ModelMeasurement], device: str) -> dict[str, float]:
    """By case, the microseconds that a call of ours takes beside the op's own call.

    On a CPU, where the op computes for milliseconds, it is the time of a call without the op, a transpose included.
    """
    known = {(row.case, row.implementation): row.host_us for row in rows if row.host_us is not None}
    ours, beside = (OURS, OP_ALONE) if device == "cuda" else (LEFT_OUT, CLOCK)
    cases = dict.fromkeys(case for case, _ in known)
    return {
        case: known[case, ours] - known[case, beside]
        for case in cases
        if {(case, ours), (case, beside)} <= known.keys()
    }


def print_host(rows: Sequence[ModelMeasurement], device: str) -> bool:
    """Print the CPU time of a call of attention in a model of transformers. True if ours meets its target, on a GPU."""
    print("\nCPU time of a call of attention in a small Llama of transformers, with autograd, 128 tokens\n")
    print(table(rows), flush=True)
    found = python_of_a_layer(rows, device)
    for case, us in found.items():
        verdict = "" if device != "cuda" else ": OK" if us <= PYTHON_US else ": TOO SLOW"
        print(f"{case}: {us:.1f} us beside the op's own call, target {PYTHON_US:.0f} beside a GPU{verdict}")
    return device != "cuda" or (bool(found) and all(us <= PYTHON_US for us in found.values()))


def table(rows: Sequence[ModelMeasurement]) -> str:
    """One line per case and implementation; `/ours`: its time over ours."""
    width = max(len(row.case) for row in rows)
    ours = {row.case: row.ms for row in rows if row.implementation == OURS}
    lines = [f"{'case':{width}} {'by':17} {'ms':>9} {'tokens/s':>9} {'GiB':>6} {'/ours':>6}"]
    for row in rows:
        head = f"{row.case:{width}} {row.implementation:17}"
        if row.ms is None or row.tokens_per_s is None:
            lines.append(f"{head} {row.note}" if row.host_us is None else f"{head} {row.host_us:.1f} us")
            continue
        own = ours.get(row.case)
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        ratio = "-" if own is None else f"{row.ms / own:.2f}"
        lines.append(f"{head} {row.ms:9.2f} {row.tokens_per_s:9.0f} {peak:>6} {ratio:>6} {row.note}".rstrip())
    return "\n".join(lines)


def run(
    cases: Sequence[ModelCase], keep: Callable[[list[dict[str, Any]]], None], clock: Clock, device: str, effort: Effort
) -> bool:
    """Measure, call `keep` with all rows after each case, and print the table. True if ours ran and is right wherever
    it is not out of memory."""
    rows: list[ModelMeasurement] = []
    if any(case.architecture != "Flax" for case in cases):
        rows += host_rows(device, effort)
        keep([asdict(row) for row in rows])
    for number, case in enumerate(cases, start=1):
        if clock.over:
            print(f"out of time: skipped {', '.join(each.name for each in cases[number - 1 :])}", flush=True)
            break
        print(f"[{number}/{len(cases)}] {case.name}", flush=True)
        rows += measure(case, device, effort)
        keep([asdict(row) for row in rows])
    if rows:
        print(f"\nmodels, a training step with AdamW, {'bfloat16' if device == 'cuda' else 'float32 on the CPU'}\n")
        print(table(rows), flush=True)
    return not any(row.note not in ("", OUT_OF_MEMORY) for row in rows if row.implementation == OURS)
