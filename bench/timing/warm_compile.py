"""Compiles the kernels of all cases in many processes, into the caches on disk that the measuring process reads.

Ours come first, in processes of their own. In a process that has only one thread to compile, inductor makes Triton use
torch's copy of the assembler, whose version is part of the key under which Triton finds a kernel. The measuring process
uses Triton's own copy, and would not find ours if they were compiled after a peer's in one process.

FlexAttention's max-autotune compiles about twenty kernels for each case, times them, and stores its choice in the cache
of inductor. This comes last, and one process at a time may use the GPU for timing while the others compile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from bench.cases.case import Case
from bench.peers.torch_peers import build
from bench.record import OURS, in_one_line
from bench.timing.measure import draw, verify
from codegen.compile.pool import my_turn, spread
from codegen.util.terminal import StatusLine

Item = TypeVar("Item")

TUNED = ("flex-max",)
"""Peers that choose a kernel by timing candidates."""

COMPILED = ("cudnn", "efficient", "fa2")
"""Peers whose kernels are precompiled."""

ANY_LENGTH = ("fa4",)
"""Peers whose kernels do not depend on the sequence length."""

Task = tuple[Case, str]
"""A case and one implementation of it."""


def share_caches() -> None:
    """Set the directory of Triton's cache for this process and its children, before anything is compiled.

    Otherwise inductor sets a directory of its own at its first use, and our kernels would be cached there from then on.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))


def rehearse(task: Task) -> None:
    """Run one implementation of a case once, so that all its kernels are compiled."""
    case, name = task
    if name == OURS:
        verify(case)
    inputs = draw(case)
    with timed_alone() if name in TUNED else contextlib.nullcontext():
        build(name, case, inputs).results()
    del inputs
    torch.compiler.reset()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def timed_alone() -> Iterator[None]:
    """Let only one process of the pool time inductor's candidates at a time.

    Raises if inductor's internals have changed; the measuring process then makes the choice itself.
    """
    from torch._inductor.select_algorithm import AlgorithmSelectorCache as Selector

    with mock.patch.object(Selector, "benchmark", one_at_a_time(Selector.benchmark)):
        yield


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that one process of a pool at a time runs it."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with my_turn():
            return function(*args, **kwargs)

    return alone


def tasks(cases: Iterable[Case]) -> dict[str, list[Task]]:
    """What is done -> its tasks, which share no process with the others; without repetitions, longest first."""
    every = [(case, name) for case in cases for name in (OURS, *case.peers) if name not in COMPILED]
    unlike = list({_compilation(task): task for task in reversed(every)}.values())[::-1]
    # The compile time of backward kernels grows with head_dim.
    unlike.sort(key=lambda task: -task[0].shape.dim)
    return {
        "compiling": [task for task in unlike if task[1] == OURS],
        "compiling peers": [task for task in unlike if task[1] != OURS and task[1] not in TUNED],
        "tuning peers": [task for task in unlike if task[1] in TUNED],
    }


def _compilation(task: Task) -> tuple[str, str]:
    """A key that is equal for tasks that compile the same kernels."""
    case, name = task
    if name in ANY_LENGTH:
        shape = replace(case.shape, batch=1, heads=case.shape.heads // case.shape.kv_heads, kv_heads=1, seq=1)
        case = replace(case, shape=shape)
    return case.name, name


def compile_all(cases: Sequence[Case], jobs: int, until: float | None) -> str:
    """Rehearse all cases; stop at the time `until` of `time.monotonic`. Returned is what is missing, if anything."""
    missing = [compile_in_parallel(rehearse, chosen, jobs, until, title) for title, chosen in tasks(cases).items()]
    return "; ".join(filter(None, missing))


def compile_in_parallel(
    task: Callable[[Item], None], items: Sequence[Item], jobs: int, until: float | None, title: str
) -> str:
    """Run a task that fills the caches for each item, with progress on a terminal and a line at the end.

    Returned is what is missing: there was no time for some items, or some failed. What failed here may fail again when
    it is measured, and is reported there.
    """
    start = time.perf_counter()
    errors: list[Exception] = []
    with StatusLine(len(items)) as status:
        status.show(f"{title}, {jobs} processes")
        for _, result in spread(task, items, jobs, until=until):
            status.done += 1
            errors += [result] if isinstance(result, Exception) else []
            status.show(f"{title}, {jobs} processes")
    missing = [] if status.done == len(items) else ["as far as there was time"]
    missing += [f"{len(errors)} of {len(items)} failed: {in_one_line(errors[0])}"] if errors else []
    if items:
        ending = "".join(f"; {each}" for each in missing)
        seconds = time.perf_counter() - start
        print(f"{title}, {jobs} processes: {status.done}/{len(items)}, {seconds:.0f} s{ending}", flush=True)
    return ", ".join(missing)
