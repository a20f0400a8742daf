"""Work that mostly compiles, spread over processes; what they compile, the parent then finds in the caches on disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.synchronize import Lock
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_JOBS = min(12, max(1, (os.cpu_count() or 2) * 3 // 4))
"""Each holds a CUDA context and the tensors of a case, together a few GiB, on the same GPU."""

_turn: Lock | None = None
"""In a worker: what whoever times something on the GPU holds meanwhile."""


def _start_worker(turn: Lock) -> None:
    global _turn
    _turn = turn
    # The pool is the parallelism: no pool of inductor's own inside each worker.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


@contextlib.contextmanager
def my_turn() -> Iterator[None]:
    """Around what at most one process of a pool may do at a time; outside a pool it does nothing."""
    with _turn or contextlib.nullcontext():
        yield


def spread(
    task: Callable[[Item], Result], items: Sequence[Item], jobs: int, until: float | None = None
) -> Iterator[tuple[Item, Result | BaseException]]:
    """`task` of every item, as they finish; what a task raises is handed on, a worker that dies included.

    At the time `until` of `time.monotonic`, what has not finished is given up and its processes are ended.
    """
    # A forked child cannot use a GPU that its parent has used.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(items)), mp_context=context, initializer=_start_worker, initargs=(context.Lock(),)
    )
    futures = {pool.submit(task, item): item for item in items}
    finished = False
    try:
        for future in as_completed(futures, None if until is None else max(0.0, until - time.monotonic())):
            error = future.exception()
            yield futures[future], future.result() if error is None else error
        finished = True
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=finished, cancel_futures=True)
        if not finished:
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
