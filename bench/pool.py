"""Work that mostly compiles, spread over processes; what they compile, the parent then finds in the caches on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_JOBS = min(8, (os.cpu_count() or 2) // 2)


def _start_worker() -> None:
    # The pool is the parallelism: no pool of inductor's own inside each worker.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def spread(
    task: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[Item, Result | BaseException]]:
    """`task` of every item, as they finish; what a task raises is handed on, a worker that dies included."""
    # A forked child cannot use a GPU that its parent has used.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=context, initializer=_start_worker) as pool:
        futures = {pool.submit(task, item): item for item in items}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], future.result() if error is None else error
