"""Compiles candidates in other processes without a GPU; the measuring process finds them in Triton's cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from codegen.arch.hopper import NAME as FAMILY
from codegen.arch.tile_rules import TileConfig
from codegen.compile.packages import Package, imported
from codegen.compile.pool import Pool, WorkerDiedError
from codegen.plan.kernel_files import FORWARD
from codegen.spec.model import KERNEL_ENDINGS, Pass
from codegen.tune.record import Group, config_of

COMPILE_LIMIT = 600.0
"""Seconds after which a compiler that hangs is killed: thirty times what the slowest kernel takes."""

CUT_SEQ, WHOLE_SEQ = 1000, 1024
"""A length that cuts the last block of every tile, and a length that cuts none: kernels are compiled once for each."""


SMALL_HEADS = (2, 2)
"""Key heads, and query heads for each of them, of calls that are compiled and checked."""


_ANY_TILE = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
"""Stands for the tile of a kernel that is not compiled."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel to compile: a group's kernel with a tile, for lengths that do or do not divide into whole blocks.

    `heads`: in the form of SMALL_HEADS. A kernel compiled for these serves calls with any number of heads, except
    packed calls, where the distance between two rows depends on the number of heads.
    """

    package: Package
    arch: str
    group: Group
    tile: TileConfig
    seq: int
    heads: tuple[int, int] = SMALL_HEADS

    @property
    def options(self) -> dict[str, Any]:
        """The call options that launch the kernel."""
        return {"config": config_of({self.group.pass_: self.tile})}

    def is_wanted(self, kernel: str) -> bool:
        """True if a kernel of that name is to be compiled."""
        return kernel.endswith(KERNEL_ENDINGS[self.group.pass_])


@dataclass(frozen=True, kw_only=True)
class HopperTask:
    """Hopper's kernels of a forward or of a backward to compile.

    `with_dq`: in a backward they also compute dq, which otherwise the portable dq kernel does. `group` is that of the
    portable kernel whose place they take: fwd or dkdv.
    """

    package: Package
    arch: str
    group: Group
    with_dq: bool
    seq: int
    heads: tuple[int, int] = SMALL_HEADS

    @property
    def options(self) -> dict[str, Any]:
        """The call options that launch them."""
        return {"family": FAMILY, "config": None if self.with_dq else config_of({Pass.DQ: _ANY_TILE})}

    def is_wanted(self, kernel: str) -> bool:
        """True if a kernel of that name is to be compiled."""
        is_forward = kernel.endswith(f"_{FORWARD}")
        return is_forward if self.group.pass_ is Pass.FWD else f"_{FAMILY}_" in kernel and not is_forward


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The result of a compilation: `fault` is empty on success; it took `seconds` of one core."""

    fault: str
    seconds: float


def compile_task(task: Task | HopperTask) -> Compilation:
    """Compile into Triton's cache."""
    start = time.perf_counter()
    fault = _fault(task)
    return Compilation(fault=fault, seconds=time.perf_counter() - start)


def _fault(task: Task | HopperTask) -> str:
    from codegen.compile.offline import compile_launches

    _arguments(task.package, task.group, task.seq, task.heads)  # imports the package
    try:
        compile_launches(lambda: call_op(task), task.group.variant, task.arch, task.package.name, only=task.is_wanted)
    except Exception as error:  # whatever the compiler raises is a reason not to take the tile
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def call_op(task: Task | HopperTask) -> None:
    """Call the op until the task's kernel is launched: forward, or forward and backward."""
    inputs, sequences = _arguments(task.package, task.group, task.seq, task.heads)
    from codegen.testing.calls import load_op

    op = load_op(task.group.variant, task.package.name)
    options = {**sequences, **task.options}
    if task.group.pass_ is Pass.FWD:
        inputs.call(op, **options)
    else:
        results_of(task.package, op, inputs, task.seq, **options)


@contextmanager
def whole_heads(package: Package) -> Iterator[None]:
    """Keep the backwards of a package from splitting query heads that share a key head into groups.

    Small calls have few blocks of keys, so that they would be split. The timed calls, whose kernels they compile and
    check, have enough blocks and are not.
    """
    module = f"{package.name}._runtime.core.head_groups"
    if find_spec(module) is None:  # a package of an earlier generator, which splits no heads
        yield
        return
    groups: Any = import_module(module)
    blocks = groups.BLOCKS_PER_PROCESSOR
    groups.BLOCKS_PER_PROCESSOR = 0
    try:
        yield
    finally:
        groups.BLOCKS_PER_PROCESSOR = blocks


def results_of(package: Package, op: Any, inputs: Any, seq: int, **options: Any) -> dict[str, Any]:
    """o and all gradients of a small call, of the kernels that timed calls run.

    At CUT_SEQ lse has a gradient too; at other lengths not, as in a training step.
    """
    from codegen.testing.calls import evaluate, evaluate_plain

    with whole_heads(package):
        return evaluate(op, inputs, **options) if seq == CUT_SEQ else evaluate_plain(op, inputs, **options)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to the width of a report."""
    return str(error).strip().partition("\n")[0][:120]


@lru_cache(maxsize=8)  # the arguments of long sequences take much memory
def _arguments(package: Package, group: Group, seq: int, heads: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a small call on the CPU, of the same layout as those on the GPU."""
    imported(Path(package.root) / package.name)
    from codegen.testing.calls import draw_call

    return draw_call(
        group.variant,
        group.mode,
        group.dtype,
        group.head_dim,
        seq=seq,
        kv_heads=heads[0],
        group=heads[1],
        device="cpu",
        package=package.name,
    )


class Compilers(Pool[Task | HopperTask, Compilation]):
    """Worker processes that compile each task once; a compiler that crashes or hangs costs only its own task."""

    def __init__(self, jobs: int) -> None:
        super().__init__(compile_task, jobs, limit=COMPILE_LIMIT)
        self._futures: dict[Task | HopperTask, Future[Compilation]] = {}

    def submit(self, item: Task | HopperTask) -> Future[Compilation]:
        """The compilation of a task, started now unless it was started before."""
        if item not in self._futures:
            self._futures[item] = super().submit(item)
        return self._futures[item]

    def finished(self) -> list[Compilation]:
        """The compilations that have finished."""
        done = (future for future in self._futures.values() if future.done() and not future.cancelled())
        return [future.result() for future in done if future.exception() is None]


def fault_of(future: Future[Compilation]) -> str:
    """Wait for a compilation; returns its fault, or ""."""
    try:
        return future.result().fault
    except WorkerDiedError as error:
        return f"the compiler crashed: {first_line(error)}"
