"""Work that compiles, spread over processes. A compiler that crashes takes one piece of work with it, not the rest."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def _start_worker() -> None:
    # Ctrl-C reaches the workers too: they end at once and leave the message to their parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spread(
    task: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result | Exception]]:
    """`task` of every item, as they finish; in place of a result the error it raised, or that its process died."""
    # When a process dies, nobody knows of which item: those that were not done are done again, each alone.
    unclear: list[Item] = []
    for item, result in _spread(task, items, processes):
        if isinstance(result, BrokenProcessPool):
            unclear.append(item)
        else:
            yield item, result
    for item in unclear:
        yield from _spread(task, [item], 1)


def _spread(
    task: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result | Exception]]:
    # A forked child would share Triton's and torch's threads, and could not use a GPU that its parent has used.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, min(processes, len(items))), mp_context=context, initializer=_start_worker)
    try:
        futures = {pool.submit(task, item): item for item in items}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                yield futures[future], future.result()
            elif isinstance(error, Exception):
                yield futures[future], error
            else:
                raise error
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
