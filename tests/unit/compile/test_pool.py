"""The process pool: results, errors, crashes, time limits and turns."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time

from codegen.compile import pool
from codegen.compile.pool import WorkerDiedError, my_turn, spread
from codegen.util.errors import CodegenError


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fail(number: int) -> int:
    """Raise, die with a message on stderr, die during a turn, or return the number."""
    match number:
        case 1:
            raise ValueError("one")
        case 2:
            raise CodegenError("two")
        case 3:
            os.write(2, b"a.cpp:7: int f(): Assertion `false' failed.\n")
            os._exit(1)
        case 4:
            with my_turn():
                os._exit(3)
    with my_turn():  # not held by the process that died
        return number


def in_turn(_: int) -> tuple[float, float]:
    """When this process entered and left its turn."""
    with my_turn():
        start = time.monotonic()
        time.sleep(0.1)
        return start, time.monotonic()


def test_every_item_has_a_result() -> None:
    assert sorted(spread(sleep, [0.0, 0.1], 2)) == [(0.0, 0.0), (0.1, 0.1)]
    assert list(spread(sleep, [], 2)) == []


def test_one_process_does_all_and_outlives_errors_and_crashes() -> None:
    found = dict(spread(fail, [0, 1, 2, 3, 4, 5], 1))
    assert (found[0], found[5]) == (0, 5)
    assert repr(found[1]) == "RuntimeError('ValueError: one')"
    assert repr(found[2]) == "CodegenError('two')"
    assert repr(found[3]) == 'WorkerDiedError("Assertion `false\' failed.")'
    assert repr(found[4]) == "WorkerDiedError('it gave no reason')"


def test_a_task_that_takes_too_long_is_killed_and_the_others_go_on() -> None:
    found = dict(spread(sleep, [600.0, 0.0], 1, limit=3))
    assert repr(found[600.0]) == "WorkerDiedError('it took longer than 3 s')"
    # A busy machine may take as long as the limit to start a process.
    assert found[0.0] == 0.0 or isinstance(found[0.0], WorkerDiedError)


def test_all_processes_end_when_the_time_is_over() -> None:
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    done = [item for item, _ in spread(sleep, [0.0, 600.0], 2, until=start + 3)]
    assert done in ([0.0], [])  # a busy machine may not have started it by then
    assert time.monotonic() - start < 60
    assert set(multiprocessing.active_children()) <= before


def test_all_processes_end_when_the_caller_is_interrupted() -> None:
    before = set(multiprocessing.active_children())
    results = spread(sleep, [0.0, 600.0], 2)
    next(results)
    results.close()
    assert set(multiprocessing.active_children()) <= before


def test_one_worker_at_a_time_has_its_turn() -> None:
    times = sorted(result for _, result in spread(in_turn, [1, 2, 3], 3) if isinstance(result, tuple))
    assert len(times) == 3
    assert all(left <= entered for (_, left), (entered, _) in itertools.pairwise(times))
    assert pool._turn is None
    with my_turn():
        pass  # outside a pool it does nothing
