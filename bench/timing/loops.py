"""Times of calls that JAX or torch enqueue: the median of rounds of many calls, each round waiting for its last."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS, ROUND_S, MOST_CALLS = 5, 0.05, 100


def loop_ms(call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Median milliseconds of one of many calls enqueued at once; `wait` blocks until a result is there."""
    return loops_ms((call, wait))[0]


def loops_ms(*measured: tuple[Callable[[], Any], Callable[[Any], Any]]) -> list[float]:
    """`loop_ms` of several calls whose rounds alternate, so that a chip that heats up slows all of them alike."""
    counts = []
    for call, wait in measured:
        wait(call())
        start = time.perf_counter()
        wait(call())
        counts.append(max(1, min(MOST_CALLS, int(ROUND_S / (time.perf_counter() - start)))))
    rounds: list[list[float]] = [[] for _ in measured]
    for _ in range(ROUNDS):
        for (call, wait), count, found in zip(measured, counts, rounds, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                last = call()
            wait(last)
            found.append((time.perf_counter() - start) / count)
    return [statistics.median(found) * 1e3 for found in rounds]
