"""Work in many processes: what it gives, what it raises, and how it ends when time is over."""

from __future__ import annotations

import multiprocessing
import os
import time

from bench.timing import pool
from bench.timing.pool import my_turn, spread


def sleep(seconds: float) -> float:
    with my_turn():
        time.sleep(seconds)
    return seconds


def fail(number: int) -> int:
    if number:
        raise ValueError("one")
    os._exit(3)


def turns(_: int) -> bool:
    """Whether what is one process's turn is not another's."""
    assert pool._turn is not None
    with my_turn():
        return pool._turn.acquire(block=False)


def test_all_is_done_where_there_is_time() -> None:
    assert sorted(spread(sleep, [0.0, 0.1], jobs=2)) == [(0.0, 0.0), (0.1, 0.1)]


def test_processes_that_take_too_long_are_ended() -> None:
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    done = [item for item, _ in spread(sleep, [0.0, 600.0], jobs=2, until=start + 3)]
    assert done in ([0.0], [])  # a busy machine may not have started it by then
    assert time.monotonic() - start < 60
    for worker in set(multiprocessing.active_children()) - before:
        worker.join(30)
        assert not worker.is_alive()


def test_what_a_process_raises_is_handed_on() -> None:
    assert [repr(result) for _, result in spread(fail, [1], jobs=1)] == ["ValueError('one')"]
    assert [type(result).__name__ for _, result in spread(fail, [0], jobs=1)] == ["BrokenProcessPool"]


def test_one_process_at_a_time_has_its_turn() -> None:
    assert [result for _, result in spread(turns, [1], jobs=1)] == [False]
    with my_turn():
        pass  # outside a pool it does nothing
