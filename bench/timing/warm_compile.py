"""Compiles what cases will run, in many processes at once, into the caches on disk that the measuring process reads.

FlexAttention's max-autotune not only compiles some twenty kernels for each case but times them, and keeps the choice in
inductor's cache. That happens after everything else and by one process at a time: the others only compile meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.cases.case import Case
from bench.peers.torch_peers import build
from bench.report.record import OURS
from bench.timing.measure import draw, verify
from codegen.compile.pool import my_turn, spread

TUNED = ("flex-max",)
"""Peers that choose among kernels by timing them."""

COMPILED = ("cudnn", "efficient", "fa2")
"""Peers that come compiled."""

ANY_LENGTH = ("fa4",)
"""Peers that compile the same for all lengths."""

Task = tuple[Case, str]
"""A case and one implementation of it."""


def share_caches() -> None:
    """Name Triton's cache, for this process and those it starts, before anything is compiled.

    Else inductor would name one of its own on its first use, and ours would look there from then on.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))


def rehearse(task: Task) -> None:
    """Run everything that one implementation of a case will run, once, so that it is compiled."""
    case, name = task
    if name == OURS:
        verify(case)
    inputs = draw(case)
    # What fails here fails again in `measure`, which reports it.
    with contextlib.suppress(Exception), _timed_alone() if name in TUNED else contextlib.nullcontext():
        build(name, case, inputs).results()
    del inputs
    torch.compiler.reset()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _timed_alone() -> Iterator[None]:
    """Let inductor time kernels only while no other process of the pool does.

    Raises where inductor has changed: then nothing is chosen here, and the measuring process chooses.
    """
    from torch._inductor.select_algorithm import AlgorithmSelectorCache as Selector

    with mock.patch.object(Selector, "benchmark", one_at_a_time(Selector.benchmark)):
        yield


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run by one process of a pool at a time."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with my_turn():
            return function(*args, **kwargs)

    return alone


def tasks(cases: Iterable[Case]) -> tuple[list[Task], list[Task]]:
    """What only compiles, and what also chooses; each once, the longest first, as far as that is known."""
    every = [(case, name) for case in cases for name in (OURS, *case.peers) if name not in COMPILED]
    unlike = list({_compilation(task): task for task in reversed(every)}.values())[::-1]
    # What backward kernels take to compile grows with the head_dim.
    unlike.sort(key=lambda task: -task[0].shape.dim)
    return [task for task in unlike if task[1] not in TUNED], [task for task in unlike if task[1] in TUNED]


def _compilation(task: Task) -> tuple[str, str]:
    """The same for tasks that compile the same."""
    case, name = task
    if name in ANY_LENGTH:
        shape = replace(case.shape, batch=1, heads=case.shape.heads // case.shape.kv_heads, kv_heads=1, seq=1)
        case = replace(case, shape=shape)
    return case.name, name


def compile_all(cases: Sequence[Case], jobs: int, until: float | None) -> None:
    """Rehearse all of the cases, or what can be until the time `until` of `time.monotonic`."""
    start = time.perf_counter()
    for title, chosen in zip(("compiling", "tuning peers"), tasks(cases), strict=True):
        done = 0
        for done, _ in enumerate(spread(rehearse, chosen, jobs, until=until), start=1):
            seconds = time.perf_counter() - start
            print(f"\r{title}, {jobs} processes: {done}/{len(chosen)}, {seconds:.0f} s ", end="", flush=True)
        if chosen:
            print("" if done == len(chosen) else "\n  out of time: the others compile as they are measured", flush=True)
