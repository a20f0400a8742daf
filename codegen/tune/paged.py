"""Tunes the kernels on paged caches: one tile for all lengths and batch sizes, the fastest on average.

A call takes a tile without looking at its batch or its lengths, so that a sequence's results have the same bits in any
batch. So a candidate is judged by the geometric mean of its times over all workloads. A file is written after each
group: the same command goes on where it was stopped.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.compile.packages import Package, imported
from codegen.compile.pool import Pool, WorkerDiedError
from codegen.spec.model import Variant
from codegen.tune.compiling import COMPILE_LIMIT, first_line
from codegen.tune.paged_space import PagedWorkload, tiles, with_other_splits, workloads
from codegen.tune.record import PagedGroup, PagedOutcome
from codegen.util.terminal import StatusLine

if TYPE_CHECKING:
    from codegen.tune.paged_measuring import PagedBench
    from codegen.tune.tuner import Context

GAIN = 0.98
"""A tile replaces the default if it takes less than this part of the default's time: smaller gains are noise."""

HOPELESS = 1.5
"""A candidate that takes this many times the best one's time so far, on average, is not timed further."""


@dataclass(frozen=True, kw_only=True)
class PagedTask:
    """One kernel to compile."""

    package: Package
    arch: str
    variant: Variant
    group: PagedGroup
    tile: PagedTileConfig


def compile_paged(task: PagedTask) -> str:
    """Compile into Triton's cache; returns the error if that fails, else ""."""
    from codegen.compile.offline import compile_launches
    from codegen.testing.calls import load_op
    from codegen.testing.paged_calls import draw_paged_call

    imported(Path(task.package.root) / task.package.name)
    op = load_op(task.variant.name, task.package.name)
    queries = 1 if task.group.pass_ is PagedPass.DECODE else 512
    small = PagedWorkload(batch=1, keys=2048, queries=queries, page_size=64)
    call = draw_paged_call(task.variant, small.shape(task.group.group, task.group.head_dim), task.group.dtype, "cpu")
    try:
        compile_launches(
            lambda: call.call(op, config={str(task.group.pass_): vars(task.tile)}),
            task.variant.name,
            task.arch,
            task.package.name,
        )
    except Exception as error:  # whatever the compiler raises is a reason not to take the tile
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


class Scores:
    """Times of the candidates of one group. `best` is the lowest geometric mean so far."""

    def __init__(self, bench: PagedBench, sizes: Sequence[PagedWorkload]) -> None:
        self.bench = bench
        self.sizes = sizes
        self.means: dict[PagedTileConfig, float] = {}
        self.times: dict[PagedTileConfig, dict[str, float]] = {}
        self.failed: dict[PagedTileConfig, str] = {}

    def measure(self, tile: PagedTileConfig) -> None:
        """Check a candidate, and time it unless it is wrong or hopeless."""
        if fault := self.bench.check(tile):
            self.failed[tile] = fault
            return
        times: dict[str, float] = {}
        best = self.times[self.best] if self.means else {}
        try:
            for size in self.sizes:
                times[str(size)] = self.bench.time(tile, size)
                if best and geometric_mean([times[name] / best[name] for name in times]) > HOPELESS:
                    return
        except Exception as error:  # out of memory, a launch that fails
            self.failed[tile] = f"{type(error).__name__}: {first_line(error)}"
            return
        self.times[tile], self.means[tile] = times, geometric_mean(list(times.values()))

    @property
    def best(self) -> PagedTileConfig:
        return min(self.means, key=lambda tile: self.means[tile])


class PagedTuner:
    """Tunes groups in order; `report` gets each result, `note` a text on the current step."""

    def __init__(
        self,
        context: Context,
        jobs: int,
        deadline: float,
        report: Callable[[PagedOutcome], None],
        note: Callable[[str], None],
    ) -> None:
        self.context = context
        self.jobs = jobs
        self.deadline = deadline
        self.report = report
        self.note = note

    def run(self, groups: Sequence[PagedGroup]) -> list[PagedGroup]:
        """Tune the groups; returns those that the budget left out."""
        left = list(groups)
        with Pool(compile_paged, self.jobs, limit=COMPILE_LIMIT) as pool:
            while left and time.monotonic() < self.deadline:
                outcome = self._tuned(pool, left[0])
                if outcome is None:
                    break
                del left[0]
                self.context.file(outcome.group.variant).add_paged(outcome, paged_hashes(self.context, outcome.group))
                self.report(outcome)
        return left

    def _tuned(self, pool: Pool[PagedTask, str], group: PagedGroup) -> PagedOutcome | None:
        """The tile of a group; None if the budget ended before all were timed."""
        from codegen.tune.paged_measuring import PagedBench

        context = self.context
        variant = context.spec.variants[group.variant]
        bench = PagedBench(context.package, variant, group)
        scores = Scores(bench, [size for size in workloads(group.pass_) if bench.fits(size)])
        default = default_tile(context, group)
        itemsize = 4 if group.dtype == "float32" else 2
        first = tiles(context.chip, group.pass_, itemsize, group.head_dim, default)
        if not self._measured(pool, scores, group, variant, first):
            return None
        # The splits of prompts hardly matter: long prompts fill the chip without any.
        if group.pass_ is PagedPass.DECODE and scores.means:
            others = list(with_other_splits(scores.best))
            if not self._measured(pool, scores, group, variant, others):
                return None
        return outcome_of(group, scores, default)

    def _measured(
        self,
        pool: Pool[PagedTask, str],
        scores: Scores,
        group: PagedGroup,
        variant: Variant,
        candidates: Sequence[PagedTileConfig],
    ) -> bool:
        """Compile and measure candidates; false if the budget ended before the last."""
        context = self.context
        futures = {
            tile: pool.submit(
                PagedTask(package=context.package, arch=context.machine.arch, variant=variant, group=group, tile=tile)
            )
            for tile in candidates
        }
        for number, (tile, future) in enumerate(futures.items(), start=1):
            if time.monotonic() > self.deadline:
                for each in futures.values():
                    each.cancel()
                return False
            if fault := _fault_of(future):
                scores.failed[tile] = fault
            else:
                scores.measure(tile)
            self.note(f"{group}: {number}/{len(candidates)} tiles")
        return True


def _fault_of(future: Future[str]) -> str:
    try:
        return future.result()
    except WorkerDiedError as error:
        return f"the compiler crashed: {first_line(error)}"


def outcome_of(group: PagedGroup, scores: Scores, default: PagedTileConfig) -> PagedOutcome:
    """The fastest tile, or the default if that is as fast."""
    if not scores.means:
        return PagedOutcome(group=group, tile=None, ms=math.inf, default_ms=None, times={}, failed=scores.failed)
    best, default_ms = scores.best, scores.means.get(default)
    if default_ms is not None and scores.means[best] > GAIN * default_ms:
        best = default
    return PagedOutcome(
        group=group,
        tile=best,
        ms=scores.means[best],
        default_ms=default_ms,
        times=scores.times[best],
        failed=scores.failed,
    )


def geometric_mean(times: Sequence[float]) -> float:
    """The mean in which each workload counts as much as any other, however long it takes."""
    return math.exp(math.fsum(map(math.log, times)) / len(times))


def default_tile(context: Context, group: PagedGroup) -> PagedTileConfig:
    """The tile that calls use if nothing is tuned."""
    problem = context.runtime("core.tuned").PagedProblem(group.dtype, group.dtype, group.head_dim, group.group)
    choices = context.runtime("core.paged_tiles").paged_ladder(group.variant, context.machine.arch, "", problem)
    return PagedTileConfig(**choices[group.pass_].tile._asdict())


def paged_hashes(context: Context, group: PagedGroup) -> Mapping[str, str]:
    """The hashes of the kernels that a group's calls run."""
    hashes: Mapping[str, str] = context.runtime("kernels").KERNEL_HASHES[group.variant]["paged"]
    return dict(hashes)


def summary(outcome: PagedOutcome) -> str:
    """The gain over the default tile, the chosen tile, and the number of tiles that failed."""
    if outcome.tile is None:
        return f"no tile works: {next(iter(outcome.failed.values()), 'no candidate')}"
    gain = "default does not run" if outcome.default_ms is None else f"{outcome.default_ms / outcome.ms:.2f} times"
    t = outcome.tile
    text = f"{t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages}, {t.keys_per_split} keys a split at least"
    failed = f", {len(outcome.failed)} tiles failed" if outcome.failed else ""
    return f"{gain} as fast as the default; {text}{failed}" if outcome.default_ms else f"{gain}; {text}{failed}"


def tune_paged(context: Context, groups: Sequence[PagedGroup], *, minutes: float, jobs: int, again: bool) -> None:
    """Tune what is not tuned yet, or with `again` all, within a budget in minutes (0 for none), and print it."""
    wanted = [
        group
        for group in groups
        if again or not context.file(group.variant).has_paged(group, paged_hashes(context, group))
    ]
    machine = context.machine
    print(
        f"{machine.gpu} ({machine.arch}), Triton {machine.triton}: {len(wanted)} kernels on paged caches to tune, "
        f"{len(groups) - len(wanted)} tuned already; results in {context.file('x').path.parent}",
        flush=True,
    )
    status = StatusLine(len(wanted))

    def report(outcome: PagedOutcome) -> None:
        status.done += 1
        status.erase()
        print(f"{status.count} {outcome.group}: {summary(outcome)}  {status.time_left}", flush=True)

    deadline = time.monotonic() + minutes * 60 if minutes else math.inf
    try:
        left = PagedTuner(context, jobs, deadline, report, status.show).run(wanted)
    except KeyboardInterrupt:
        print(
            f"\n{status.done} of {len(wanted)} are tuned and written; run the same command again to continue",
            file=sys.stderr,
        )
        raise
    finally:
        status.erase()
    if left:
        print(f"the budget left out {len(left)} kernels, from {left[0]} on; run the same command again for them")
