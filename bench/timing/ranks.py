"""Ranks that measure together: they agree on the next job, survive an error of one, and time calls side by side.

They exchange small values through a store on the host, never through the GPUs: a rank that fails can still report it
while the others wait for it in a collective.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch

from bench.record import in_one_line

T = TypeVar("T")

MOST_CALLS, ROUND_MS, ALL_ROUNDS_MS, ROUNDS = 40, 100.0, 1000.0, (2, 4)
"""Most calls of a round, milliseconds of a round and of all rounds, and the least and the largest number of rounds."""


SLICE_S = 0.5
"""Seconds for which a rank waits for the others before it looks whether one failed."""


class OtherRankError(RuntimeError):
    """Another rank failed while this one waited for it."""


class RanksLostError(RuntimeError):
    """The ranks can no longer work together: their processes must end."""


class Ranks:
    """This process among `size`.

    Args:
        store: the `torch.distributed` store through which ranks exchange values; None for a single rank.
        mesh: a DeviceMesh of one dim over all ranks, or None.
        patience: seconds that a rank waits for the others.
    """

    def __init__(self, rank: int, size: int, device: str, store: Any, mesh: Any, patience: float) -> None:
        self.rank, self.size, self.device, self.mesh = rank, size, device, mesh
        self._store, self._patience = store, patience
        # The number of exchanges so far in each of the nested attempts: they make the key of the next exchange.
        self._path = [0]

    def _next(self) -> str:
        self._path[-1] += 1
        return ".".join(map(str, self._path))

    def gather(self, x: Any) -> list[Any]:
        """The values of `x` of every rank, converted through JSON. Raises an error if a rank is silent or fails."""
        if self.size == 1:
            return [json.loads(json.dumps(x))]
        return self._exchange(self._next(), x, self._patience)

    def _exchange(self, name: str, x: Any, patience: float) -> list[Any]:
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(x))
        end = time.monotonic() + patience
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=SLICE_S))
                return [json.loads(self._store.get(key)) for key in keys]
            except Exception as error:  # torch raises several kinds
                if time.monotonic() > end:
                    silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise RanksLostError(f"no answer of ranks {silent} within {patience:.0f} s") from error
                for depth in range(1, len(self._path)):
                    failed = f"failed/{'.'.join(map(str, self._path[:depth]))}"
                    if self._store.check([failed]):
                        raise OtherRankError(self._store.get(failed).decode()) from error

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Wait until every rank's device is idle."""
        if self.size > 1:
            import torch.distributed as dist

            # On the default group, whose device is this rank's.
            dist.barrier(device_ids=[self.rank] if self.device == "cuda" else None)
        self.synchronize()

    def attempt(self, call: Callable[[], T]) -> tuple[T | None, str]:
        """The result of `call` on this rank and ""; or None and the reason, if it failed on any rank.

        Attempts may be nested. Raises `RanksLostError` if the ranks cannot go on: one of them is stuck in a collective,
        or a GPU or NCCL is in error.
        """
        name, found, problem = self._next(), None, ""
        self._path.append(0)
        try:
            found = call()
            self.synchronize()
        except RanksLostError:
            raise
        except Exception as error:  # a peer may fail in any way; its row says so
            problem = self._failed(name, error)
        self._path.pop()
        if self.size == 1:
            return (None, problem) if problem else (found, "")
        try:
            problems = self._exchange(f"{name}/end", problem, self._patience / 2 if problem else self._patience)
        except (RanksLostError, OtherRankError) as error:
            raise RanksLostError(problem or str(error)) from error
        failed = next(((rank, text) for rank, text in enumerate(problems) if text), None)
        if failed is None:
            return found, ""
        return None, failed[1] + ("" if all(problems) else f" (rank {failed[0]})")

    def _failed(self, name: str, error: Exception) -> str:
        """Report an error to the other ranks; returns its text."""
        problem = str(error) if isinstance(error, OtherRankError) else in_one_line(error, 200)
        if self.size > 1:
            self._store.set(f"failed/{name}", problem)
        if not isinstance(error, torch.OutOfMemoryError) and ("CUDA error" in problem or "NCCL" in problem):
            raise RanksLostError(problem) from error
        try:
            self.synchronize()
        except Exception as later:
            raise RanksLostError(f"{problem}; then {in_one_line(later, 200)}") from later
        return problem


def free_memory(device: str) -> None:
    """Free memory on the GPU to which nothing refers, that of tensors in reference cycles included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def once_ms(ranks: Ranks, call: Callable[[], Any], count: int = 1) -> float:
    """Milliseconds of one of `count` calls on this rank, enqueued at once after a barrier of all ranks.

    Several calls are preceded by one that is not timed: the timed ones are enqueued while it runs, as the calls of a
    layer in a training step are enqueued while earlier layers run.
    """
    ranks.barrier()
    if ranks.device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if count > 1:
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / count


def side_by_side_ms(ranks: Ranks, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of each call on every rank: the median of rounds that take the calls in turn.

    So the heat of the chips affects all calls alike. Every call must have run before. Here its first run is timed to
    choose the number of calls and rounds.
    """
    counts: dict[str, tuple[int, int]] = {}
    for name, call in calls.items():
        if ranks.device != "cuda":
            counts[name] = 1, ROUNDS[0]  # a CPU only tries the suite
            continue
        ms = max(ranks.gather(once_ms(ranks, call)))
        if ms < ROUND_MS:
            # The op may still record its second call, to replay it in later calls: it takes longer than these.
            ms = max(ranks.gather(once_ms(ranks, call, 2)))
        count = max(1, min(MOST_CALLS, round(ROUND_MS / ms)))
        counts[name] = count, max(ROUNDS[0], min(ROUNDS[1], round(ALL_ROUNDS_MS / (ms * count))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS[1]):
        for name, call in calls.items():
            count, rounds = counts[name]
            if turn < rounds:
                found[name].append(once_ms(ranks, call, count))
    every = ranks.gather({name: statistics.median(each) for name, each in found.items()})
    return {name: [each[name] for each in every] for name in calls}
