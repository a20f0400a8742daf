"""Variants spread over processes: one that crashes or hangs costs the variant at fault alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from codegen.compile.pool import spread

from .package import name_of
from .running import Failure
from .session import FATAL, Outcome, Plan, drawn, run_variants

HANGS_AFTER = 420.0
"""Seconds after which a process that is still at one chunk of variants is killed."""


def run_all(plan: Plan, numbers: Sequence[int], *, chunk: int, jobs: int = 0) -> Outcome:
    """What comes of all these variants; without `jobs` in this process."""
    outcome = Outcome()
    for part in outcomes(plan, numbers, chunk=chunk, jobs=jobs):
        outcome.add(part)
    return outcome


_unusable = False


def _task(plan: Plan, numbers: tuple[int, ...]) -> Outcome:
    """One chunk in a process of its own. After an error that the GPU does not recover from, the process ends itself at
    the next chunk, which is then given to another."""
    global _unusable
    if _unusable:
        os._exit(1)
    outcome = run_variants(plan, numbers)
    _unusable = any(word in failure.text for _, failure in outcome.failures for word in FATAL)
    return outcome


def outcomes(plan: Plan, numbers: Sequence[int], *, chunk: int, jobs: int) -> Iterator[Outcome]:
    """What comes of the variants with these numbers, so many at a time; without `jobs` in this process."""
    chunks = [tuple(numbers[i : i + chunk]) for i in range(0, len(numbers), chunk)]
    if jobs == 0:
        yield from (run_variants(plan, each) for each in chunks)
        return
    task: Callable[[tuple[int, ...]], Outcome] = partial(_task, plan)
    waiting, died = list(chunks), dict[int, int]()
    while waiting:
        again: list[tuple[int, ...]] = []
        for each, result in spread(task, waiting, jobs, limit=HANGS_AFTER):
            if isinstance(result, Outcome):
                again += [(number,) for number in result.left]
                yield result
                continue
            for number in each:
                died[number] = died.get(number, 0) + 1
                if died[number] < 3:
                    again.append((number,))
                else:
                    yield _lost(plan, number, result)
        waiting = again


def _lost(plan: Plan, number: int, error: Exception) -> Outcome:
    """A variant that ended its process, every time; one of these calls did it."""
    text = f"{type(error).__name__}: {error}"
    entry, calls = drawn(plan, number)
    failures = [Failure(variant=name_of(number), entry=entry, call=call, kind="error", text=text) for call in calls]
    return Outcome(variants=1, failures=[(number, failure) for failure in failures])
