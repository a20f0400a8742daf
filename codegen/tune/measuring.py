"""Checks and times on the GPU: tiles of one kernel, and kernel families side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codegen.arch.tile_rules import TileConfig
from codegen.compile.packages import Package
from codegen.spec.model import KERNEL_ENDINGS, Pass
from codegen.testing.calls import BOUND, SEGMENTS, Inputs, draw_call, load_op, load_reference, relative_errors
from codegen.tune.compiling import CUT_SEQ, SMALL_HEADS, WHOLE_SEQ, first_line, results_of
from codegen.tune.record import Comparison, Group, Workload, config_of
from codegen.tune.timing import clearings_until, clock, in_turn

TOKENS = 16_384
"""Tokens of a timed call, all its sequences together."""

DOCUMENTS = 4
"""Least number of sequences in a timed packed call: one alone would say nothing about calls with several."""

WIDTH = 2_048
"""Query heads times head_dim of a timed call: with TOKENS, the sizes of the FlashAttention papers' benchmarks."""

FIRST_ROUNDS, LAST_ROUNDS = 3, 9
"""How often a candidate is timed, and how often the winner beside the default."""

HOPELESS = 1.25
"""A candidate whose first round takes this many times the best one's time is not timed again."""

TIMED_MS = 30.0
"""GPU time that a contender is timed for on a workload."""


def timed_heads(head_dim: int, workload: Workload) -> tuple[int, int]:
    """Number of key heads of a timed call, and query heads per key head."""
    return max(1, WIDTH // head_dim // workload.group), workload.group


def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


class KernelTimes:
    """Times the launches of one kernel with events that Triton's launch hooks record."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.events: list[torch.cuda.Event] = []

    def _note(self, metadata: Any) -> None:
        if str(metadata.get()["name"]).endswith(self.suffix):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.events.append(event)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the launches inside."""
        from triton import knobs

        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        # The two lists of hooks refuse a function that they hold already, so each gets its own.
        enter, leave = (lambda metadata: self._note(metadata)), (lambda metadata: self._note(metadata))
        hooks[0].add(enter)
        hooks[1].add(leave)
        try:
            yield
        finally:
            hooks[0].remove(enter)
            hooks[1].remove(leave)

    def milliseconds(self) -> list[float]:
        """The recorded times, which are then cleared."""
        torch.cuda.synchronize()
        events, self.events = self.events, []
        return [start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True)]


class Bench:
    """Checks and times tiles of one group's kernel.

    `others`: tiles of other passes, which a backward runs too. For a pass without one the package chooses the tile.
    """

    def __init__(self, package: Package, group: Group) -> None:
        self.package = package
        self.group = group
        self.others: Mapping[Pass, TileConfig] = {}
        self.op = load_op(group.variant, package.name)
        self.best: dict[Workload, float] = {}

    def check(self, tile: TileConfig, seq: int) -> str:
        """Compare the kernel's results at a small size with float64; returns "" if they are right, else the error.

        At CUT_SEQ all gradients are compared, and lse has a gradient too; at WHOLE_SEQ only o, dq, dk and dv are. The
        gradients of a variant's own tensors are left out there: they are sums of large terms that nearly cancel, so
        that their errors show rounding, not a wrong tile.
        """
        try:
            inputs, sequences, wanted = golden_call(self.package, self._family(), seq, SMALL_HEADS)
            got = self._results(inputs, sequences, tile, seq)
            names = got.keys() if seq == CUT_SEQ else got.keys() & _OF_A_STEP
            return _error_text(got, {name: wanted[name] for name in names})
        except Exception as error:  # out of resources, a compiler's failure: all are reasons not to take it
            return _reason(error)

    def time(self, tile: TileConfig, workload: Workload) -> float:
        """The median of some rounds in milliseconds, or one round if that is far behind the workload's best."""
        run = self._runner(tile, workload)
        run()  # the first loads the kernel
        times = [run()]
        if times[0] <= HOPELESS * self.best.get(workload, times[0]):
            times += [run() for _ in range(FIRST_ROUNDS - 1)]
        median = statistics.median(times)
        self.best[workload] = min(self.best.get(workload, median), median)
        return median

    def duel(self, tiles: Sequence[TileConfig], workload: Workload) -> list[float]:
        """The median time of each tile, measured in interleaved rounds so that a hot chip slows all alike."""
        runs = [self._runner(tile, workload) for tile in tiles]
        rounds = [[run() for run in runs] for _ in range(LAST_ROUNDS + 1)][1:]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _runner(self, tile: TileConfig, workload: Workload) -> Callable[[], float]:
        """A function that runs the kernel once with a cold L2 cache and returns milliseconds.

        The GPU clears the cache until the kernel is in its queue: else its time would hold that of the launch.
        """
        from triton.runtime import driver

        inputs, sequences = timed_call(self.package, self._family(), workload)
        options = {**sequences, "config": self._config(tile)}
        leaves = list(inputs.leaves().values())
        o = None if self.group.pass_ is Pass.FWD else inputs.call(self.op, **options)
        times = KernelTimes(KERNEL_ENDINGS[self.group.pass_])
        filler = driver.active.get_empty_cache_for_benchmark()
        clearings = 1

        def run() -> float:
            nonlocal clearings
            for _ in range(clearings):
                driver.active.clear_cache(filler)
            begin = time.perf_counter()
            with times.noting():
                if o is None:
                    inputs.call(self.op, **options)
                else:
                    torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
            clearings = clearings_until(time.perf_counter() - begin)
            return sum(times.milliseconds())

        return run

    def _results(self, inputs: Inputs, sequences: dict[str, Any], tile: TileConfig, seq: int) -> dict[str, Tensor]:
        options = {**sequences, "config": self._config(tile)}
        if self.group.pass_ is Pass.FWD:
            return {"o": inputs.call(self.op, **options).detach()}
        return results_of(self.package, self.op, inputs, seq, **options)

    def _config(self, tile: TileConfig) -> dict[str, dict[str, int]]:
        return config_of({**self.others, self.group.pass_: tile})

    def _family(self) -> Group:
        """The group that represents all passes, which share their inputs."""
        return replace(self.group, pass_=Pass.FWD)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Kernels that a forward or backward may run: those of a family, and portable ones beside them.

    `tiles`: the tiles of the portable kernels. `own`: the tile of Hopper's kernels. `seq`: the length at which they are
    compiled and checked, and at which Hopper's kernels use `own`. `heads`: key heads, and query heads for each, for
    which they are compiled.
    """

    name: str
    family: str
    tiles: tuple[tuple[Pass, TileConfig], ...]
    own: TileConfig | None = None
    seq: int = WHOLE_SEQ
    heads: tuple[int, int] = SMALL_HEADS

    @property
    def options(self) -> dict[str, Any]:
        """The call options that run them."""
        return {"family": self.family, "config": config_of(dict(self.tiles)) or None}


class FamilyBench:
    """Checks and times the contenders of one comparison."""

    def __init__(self, package: Package, comparison: Comparison) -> None:
        self.package = package
        self.comparison = comparison
        self.op = load_op(comparison.variant, package.name)
        self._is_forward = comparison.pass_ == "fwd"
        self._group = comparison.group(Pass.FWD)

    def check(self, contender: Contender) -> str:
        """Compare a contender's results with float64, as `Bench.check` does for tiles; returns "" if they are right."""
        # Not inside `try`: an error of the golden call is no contender's fault.
        if contender.seq == WHOLE_SEQ:
            inputs, sequences, wanted = golden_call(self.package, self._group, contender.seq, contender.heads)
        else:
            inputs, sequences, wanted = golden_output(self.package, self._group, contender.seq)
        try:
            options = {**sequences, **contender.options}
            if self._is_forward:
                got = {"o": inputs.call(self.op, **options).detach()}
            else:
                got = results_of(self.package, self.op, inputs, contender.seq, **options)
            return _error_text(got, {name: wanted[name] for name in got.keys() & _OF_A_STEP})
        except Exception as error:  # as for tiles
            return _reason(error)

    def race(self, contenders: Sequence[Contender], workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds that the GPU takes for a whole forward or backward of each contender, in interleaved rounds.

        Also returns the reasons why other contenders could not be timed.
        """
        try:
            inputs, sequences = timed_call(self.package, self._group, workload)
        except Exception as error:  # out of memory, or a GPU that an earlier kernel has lost
            return {}, {contender.name: _reason(error) for contender in contenders}
        leaves = list(inputs.leaves().values())

        def forward(options: dict[str, Any]) -> Callable[[], Any]:
            def call() -> Any:
                with torch.no_grad():
                    return inputs.call(self.op, **sequences, **options)

            return call

        def backward(options: dict[str, Any]) -> Callable[[], Any]:
            o = inputs.call(self.op, **sequences, **options)
            return lambda: torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)

        calls: dict[str, Callable[[], Any]] = {}
        failed: dict[str, str] = {}
        for contender in contenders:
            try:
                calls[contender.name] = (forward if self._is_forward else backward)(contender.options)
            except Exception as error:
                failed[contender.name] = _reason(error)
        times, errors = in_turn(calls, TIMED_MS, clock().queued)
        failed |= {name: _reason(error) for name, error in errors.items()}
        return {name: timing.ms for name, timing in times.items()}, failed


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


_OF_A_STEP = {"o", "dq", "dk", "dv"}
"""The results of a training step that are compared. `Bench.check` says why the other gradients are not."""


def _error_text(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The error in a call's results, or ""."""
    errors = relative_errors(got, wanted)
    worst = max(errors, key=lambda name: errors[name])
    bound = BOUND[got["o"].dtype]
    return "" if errors[worst] <= bound else f"wrong: {worst} is off by {errors[worst]:.1e}, bound {bound:.0e}"


@lru_cache(maxsize=12)
def golden_call(
    package: Package, group: Group, seq: int, heads: tuple[int, int]
) -> tuple[Inputs, dict[str, Any], dict[str, Tensor]]:
    """A call on the GPU, and its results in float64."""
    inputs, sequences = _drawn(package, group, seq, heads)
    reference = load_reference(group.variant, packed=group.mode == "packed", package=package.name)
    return inputs, sequences, results_of(package, reference, inputs.double(), seq, **sequences)


@lru_cache(maxsize=1)
def golden_output(package: Package, group: Group, seq: int) -> tuple[Inputs, dict[str, Any], dict[str, Tensor]]:
    """A call with few heads on the GPU, and its output in float64: at such lengths the scores take a GiB."""
    inputs, sequences = _drawn(package, group, seq, (1, SMALL_HEADS[1]))
    reference = load_reference(group.variant, packed=group.mode == "packed", package=package.name)
    with torch.no_grad():
        return inputs, sequences, {"o": inputs.double().call(reference, **sequences)}


@lru_cache(maxsize=14)
def timed_call(package: Package, group: Group, workload: Workload) -> tuple[Inputs, dict[str, Any]]:
    """The call that is timed for a workload, on the GPU. A segmented one has rows of SEGMENTS times its length."""
    seq = workload.seq * SEGMENTS if group.mode == "segmented" else workload.seq
    batch = max(DOCUMENTS if group.mode == "packed" else 1, TOKENS // seq)
    return _drawn(package, group, seq, timed_heads(group.head_dim, workload), batch)


def _drawn(
    package: Package, group: Group, seq: int, heads: tuple[int, int], batch: int = 1
) -> tuple[Inputs, dict[str, Any]]:
    """Arguments of a call on the GPU; `heads`: key heads, and query heads for each."""
    return draw_call(
        group.variant,
        group.mode,
        group.dtype,
        group.head_dim,
        seq=seq,
        batch=batch,
        kv_heads=heads[0],
        group=heads[1],
        device="cuda",
        package=package.name,
    )
