"""Times several calls on the GPU in interleaved rounds, so that a chip that heats up slows all of them alike.

The tuner uses it for kernel families, the benchmark for peers.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

ROUNDS = 5
MOST_CALLS = 100
"""Most calls in one round."""

CLEARING_S = 5e-5
"""The least time in which a GPU clears its L2 cache as `on_gpu` does: 256 MiB, at 5 TB/s."""

MOST_CLEARINGS = 50
"""Most times that the L2 cache is cleared before one call: at least 2.5 ms."""

LONG_MS = 1000.0
"""A call that takes at least this long is not warmed up and hardly repeated."""

Sample = Callable[[Callable[[], Any], int], list[float]]
"""Runs a call a number of times; returns the milliseconds of each run."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The median of the rounds' medians, and their spread: greatest minus least, divided by `ms`."""

    ms: float
    spread: float


@functools.cache
def _l2_filler() -> torch.Tensor:
    """A buffer that fills the L2 cache when written; it has the size that `triton.testing.do_bench` uses."""
    return torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def on_gpu(call: Callable[[], Any], count: int, clearings: int = 1) -> list[float]:
    """One sample as in `triton.testing.do_bench`: between two events on the stream, with a cleared L2 cache."""
    cache = _l2_filler()
    pairs = [(_event(), _event()) for _ in range(count)]
    for start, end in pairs:
        for _ in range(clearings):
            cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def queued_on_gpu(call: Callable[[], Any], count: int) -> list[float]:
    """As `on_gpu`, without the time in which the GPU waits for the CPU: it clears its cache until all kernels of a call
    are in its queue. A CPU that compiles at the same time takes several times as long to launch kernels."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    return on_gpu(call, count, clearings_until(time.perf_counter() - begin))


def clearings_until(launched: float) -> int:
    """How many times a GPU clears its cache while the CPU launches a call, with as many seconds to spare.

    >>> clearings_until(0.0), clearings_until(1e-4)
    (1, 5)
    """
    return min(1 + math.ceil(2 * launched / CLEARING_S), MOST_CLEARINGS)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How calls are timed.

    `sample` times single calls; `queued` leaves out the time in which the GPU waits for the CPU. `wait` returns when
    everything that was enqueued is done.
    """

    sample: Sample = on_gpu
    queued: Sample = queued_on_gpu
    wait: Callable[[], Any] = torch.cuda.synchronize


_clock = Clock()


def clock() -> Clock:
    """The clock in use: that of the GPU, unless `using` has replaced it."""
    return _clock


@contextmanager
def using(other: Clock) -> Iterator[None]:
    """Time everything with another clock, for instance where there is no GPU."""
    global _clock
    before, _clock = _clock, other
    try:
        yield
    finally:
        _clock = before


def in_turn(
    calls: Mapping[str, Callable[[], Any]], budget_ms: float, sample: Sample | None = None
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """The times of `calls`, and the errors of those that could not be timed.

    Each call gets `budget_ms` of GPU time over all rounds. Without `sample`, the `sample` of the clock in use is taken.
    """
    sample = sample or clock().sample
    estimates: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, call in calls.items():
        try:
            estimates[name] = _estimate(call, sample)
        except Exception as error:  # a peer may fail in any way; the others go on
            failed[name] = error
    medians: dict[str, list[float]] = {name: [] for name in estimates}
    for number in range(ROUNDS):
        for name in _rotated(list(estimates), number):
            if name in failed or number * estimates[name] > 2 * budget_ms:
                continue  # so slow that the rounds before were enough
            try:
                medians[name].append(_round(calls[name], estimates[name], budget_ms / ROUNDS, sample))
            except Exception as error:
                failed[name] = error
    found = {name: _timing(times) for name, times in medians.items() if name not in failed}
    return found, failed


def _estimate(call: Callable[[], Any], sample: Sample) -> float:
    # The first call may compile, and the GPU waits for that between the events.
    compiled, first = sample(call, 1)[0], sample(call, 1)[0]
    return min(compiled, first) if first >= LONG_MS else min(sample(call, 3))


def _round(call: Callable[[], Any], estimate_ms: float, budget_ms: float, sample: Sample) -> float:
    count = max(1, min(MOST_CALLS, round(budget_ms / max(estimate_ms, 1e-6))))
    warm = 0 if estimate_ms >= LONG_MS else 1  # its code has left the caches while the others ran
    return statistics.median(sample(call, warm + count)[warm:])


def _rotated(names: list[str], number: int) -> list[str]:
    first = number % max(1, len(names))
    return names[first:] + names[:first]


def _timing(times: list[float]) -> Timing:
    middle = statistics.median(times)
    return Timing(ms=middle, spread=(max(times) - min(times)) / middle)
