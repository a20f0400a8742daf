"""The tuner: compiles candidates on the host's cores while the GPU checks and times the finished ones."""

from __future__ import annotations

import importlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.arch.chips import SAME_TILES
from codegen.arch.tile_rules import TileConfig
from codegen.compile.packages import Package
from codegen.inspect.block_status import Grid, Status, proven
from codegen.inspect.call import make_call
from codegen.spec.model import Pass, Spec, Variant
from codegen.tune.compiling import CUT_SEQ, WHOLE_SEQ, Compilation, Compilers, Task, fault_of
from codegen.tune.measuring import TOKENS, WIDTH, Bench, multiprocessors
from codegen.tune.priors import Priors
from codegen.tune.record import Group, Machine, Outcome, TunedFile, Winner, Workload
from codegen.tune.space import Kernel, Work, candidates

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

MOST_CANDIDATES, LEAST_CANDIDATES = 48, 2
"""Tiles tried for one kernel, beside its defaults, without a budget and with a small one."""

COMPILE_SECONDS = 2.5
"""Seconds that one core of a server takes to compile one kernel, to divide a budget."""

GAIN = 0.99
"""A tile replaces the default if it takes less than this part of the default's time: smaller gains are noise."""

_MODEL_SEQ = 2048
"""The length at which the model of time counts the blocks that a mask visits."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The kernels to tune. `budget` is in seconds; None means no limit."""

    groups: Sequence[Group]
    workloads: Sequence[Workload]
    budget: float | None
    jobs: int


@dataclass(frozen=True, kw_only=True)
class Context:
    """The spec, package and machine, which all groups share."""

    spec: Spec
    package: Package
    folder: Path
    machine: Machine

    def runtime(self, name: str) -> Any:
        """A module of the package's runtime: `kernels`, `core.configs`."""
        return importlib.import_module(f"{self.package.name}._runtime.{name}")

    @property
    def chip(self) -> str:
        """The architecture whose tiles the GPU uses."""
        arch = self.machine.arch
        return SAME_TILES.get(arch, arch)

    def kernel_hash(self, group: Group) -> str:
        """The hash of a group's rendered kernel."""
        return str(self.runtime("kernels").KERNEL_HASHES[group.variant][group.mode][group.pass_])

    def file(self, variant: str) -> TunedFile:
        """The tuned file of a variant on this GPU."""
        tuned = self.runtime("core.tuned")
        return TunedFile(tuned.tuned_path(tuned.gpu_key(self.machine.gpu), variant, self.folder), self.machine)

    def default(self, group: Group, workload: Workload) -> TileConfig:
        """The tile that a call uses if nothing is tuned."""
        problem = self.runtime("core.tuned").Problem(
            group.mode, group.dtype, group.head_dim, workload.group, workload.seq
        )
        choice = self.runtime("core.configs").ladder(group.variant, self.machine.arch, "", problem)[group.pass_]
        return TileConfig(**choice.tile._asdict())


@dataclass(kw_only=True)
class Trial:
    """A group in progress: its candidates, their compilations, then their times.

    `cut`: compilations of the leading tiles for a length that cuts a block. `right`: tiles that are correct there.
    """

    group: Group
    bench: Bench
    defaults: Mapping[Workload, TileConfig]
    compiling: dict[Future[Compilation], TileConfig]
    times: dict[Workload, dict[TileConfig, float]] = field(default_factory=dict)
    failed: dict[TileConfig, str] = field(default_factory=dict)
    cut: list[Future[Compilation]] = field(default_factory=list)
    right: set[TileConfig] = field(default_factory=set)

    def ranking(self, workload: Workload) -> list[TileConfig]:
        """The timed tiles, fastest first."""
        times = self.times.get(workload, {})
        return sorted(times, key=lambda tile: times[tile])


class Tuner:
    """Tunes the groups of a request; `report` gets each result, `note` a text on the current step."""

    def __init__(
        self, context: Context, request: Request, report: Callable[[Outcome], None], note: Callable[[str], None]
    ) -> None:
        self.context = context
        self.request = request
        self.report = report
        self.note = note
        self.priors = Priors.read(context.folder / "tuned", context.machine.arch)
        self.visits = Visits()
        # Tiles that are known to run. A default that does not run would make the other kernel of a backward fail, too.
        self.right: dict[tuple[str, str, str, int], dict[Pass, TileConfig]] = {}
        self.compiled: list[Compilation] = []
        self.measuring = 0.0
        self.deadline = math.inf if request.budget is None else time.monotonic() + request.budget

    def run(self) -> list[Group]:
        """Tune the groups in order; returns those that the budget left out."""
        left = deque(self.request.groups)
        with Compilers(self.request.jobs) as pool:
            begun: deque[Trial] = deque()
            measured: deque[Trial] = deque()
            while (left or begun) and not self._late:
                while left and len(begun) < self._ahead:
                    begun.append(self._begin(pool, left.popleft()))
                trial = begun.popleft()
                self._measure(trial)
                self._begin_cuts(pool, trial)
                measured.append(trial)
                while measured and all(future.done() for future in measured[0].cut):
                    self._finish(pool, measured.popleft())
            for trial in measured:
                self._finish(pool, trial)
            self.compiled = pool.finished()
        return [*(trial.group for trial in begun), *left]

    @property
    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def _ahead(self) -> int:
        """Groups that are compiled ahead: enough that no core waits for a slow compilation of the first group."""
        return 1 + math.ceil(6 * self.request.jobs / self._most)

    @property
    def _most(self) -> int:
        """Candidates per group beside the defaults, from the budget and the time that compiling takes."""
        if self.request.budget is None:
            return MOST_CANDIDATES
        affordable = self.request.budget * self.request.jobs / COMPILE_SECONDS / max(1, len(self.request.groups))
        # Half of them, because some are compiled again for lengths that cut a block, and measuring takes time as well.
        return max(LEAST_CANDIDATES, min(MOST_CANDIDATES, int(affordable / 2)))

    def _begin(self, pool: Compilers, group: Group) -> Trial:
        defaults = {workload: self.context.default(group, workload) for workload in self.request.workloads}
        tiles = self._candidates(group, list(dict.fromkeys(defaults.values())))
        compiling = {self._compiled(pool, group, tile, WHOLE_SEQ): tile for tile in tiles}
        return Trial(group=group, bench=Bench(self.context.package, group), defaults=defaults, compiling=compiling)

    def _candidates(self, group: Group, defaults: Sequence[TileConfig]) -> list[TileConfig]:
        """The defaults, known winners, and the best of the rest by the model of time: at least a third of all."""
        context, variant = self.context, self.context.spec.variants[group.variant]
        kernel = Kernel(pass_=group.pass_, arch=context.chip, itemsize=ITEMSIZE[group.dtype], head_dim=group.head_dim)
        archs = [table[context.chip] for table in (variant.archs, context.spec.archs) if context.chip in table]
        first = list(dict.fromkeys([*defaults, *self.priors.of(group)]))
        ranked = candidates(kernel, archs, first, _work(variant, group, self.visits))
        # One 16-bit dtype says nearly everything about the other, and one GPU about others with the same chip.
        most = max(self._most // 2 if self.priors.knows(group) else self._most, LEAST_CANDIDATES)
        familiar = ranked[: len(defaults) + math.ceil(most * 2 / 3)]
        new = [tile for tile in ranked if tile not in first and tile not in familiar]
        return [*familiar, *new[: len(defaults) + most - len(familiar)]]

    def _compiled(self, pool: Compilers, group: Group, tile: TileConfig, seq: int) -> Future[Compilation]:
        task = Task(package=self.context.package, arch=self.context.machine.arch, group=group, tile=tile, seq=seq)
        return pool.submit(task)

    def _measure(self, trial: Trial) -> None:
        """Check and time each candidate as soon as it has compiled."""
        family = (trial.group.variant, trial.group.mode, trial.group.dtype, trial.group.head_dim)
        trial.bench.others = dict(self.right.get(family, {}))
        total = len(trial.compiling)
        for done, future in enumerate(as_completed(trial.compiling), start=1):
            tile, start = trial.compiling[future], time.monotonic()
            if fault := fault_of(future) or trial.bench.check(tile, WHOLE_SEQ):
                trial.failed[tile] = fault
            else:
                for workload in self.request.workloads:
                    trial.times.setdefault(workload, {})[tile] = trial.bench.time(tile, workload)
            self.measuring += time.monotonic() - start
            self.note(f"{trial.group}: {done}/{total} tiles")
        longest = max(self.request.workloads)
        for tile in trial.ranking(longest)[:1]:
            self.right.setdefault(family, {})[trial.group.pass_] = tile

    def _begin_cuts(self, pool: Compilers, trial: Trial) -> None:
        """Compile the leading tiles for lengths that cut a block: a tile must be correct there too before it counts."""
        for workload in self.request.workloads:
            for tile in trial.ranking(workload)[:1]:
                trial.cut.append(self._compiled(pool, trial.group, tile, CUT_SEQ))

    def _finish(self, pool: Compilers, trial: Trial) -> None:
        """Choose the winner of each workload and write the results."""
        winners = [winner for workload in self.request.workloads if (winner := self._winner(pool, trial, workload))]
        for winner in winners:
            self.priors.add(trial.group, winner.tile)
        outcome = Outcome(group=trial.group, winners=winners, failed=trial.failed)
        self.context.file(trial.group.variant).add(outcome, self.context.kernel_hash(trial.group))
        self.report(outcome)

    def _winner(self, pool: Compilers, trial: Trial, workload: Workload) -> Winner | None:
        """The fastest tile that is correct everywhere, with the default's time; None if there is none."""
        right = (tile for tile in trial.ranking(workload) if self._right_when_cut(pool, trial, tile))
        best, default = next(right, None), trial.defaults[workload]
        if best is None:
            return None
        if default in trial.failed:
            return Winner(workload=workload, tile=best, ms=trial.times[workload][best], default_ms=None)
        if best == default:
            ms = trial.times[workload][best]
            return Winner(workload=workload, tile=best, ms=ms, default_ms=ms)
        ms, default_ms = trial.bench.duel([best, default], workload)
        if ms > GAIN * default_ms and self._right_when_cut(pool, trial, default):
            best, ms = default, default_ms
        return Winner(workload=workload, tile=best, ms=ms, default_ms=default_ms)

    def _right_when_cut(self, pool: Compilers, trial: Trial, tile: TileConfig) -> bool:
        if tile not in trial.failed and tile not in trial.right:
            compiled = self._compiled(pool, trial.group, tile, CUT_SEQ)
            if fault := fault_of(compiled) or trial.bench.check(tile, CUT_SEQ):
                trial.failed[tile] = f"at a length that cuts a block: {fault}"
            else:
                trial.right.add(tile)
        return tile in trial.right


class Visits:
    """Scores that a variant's kernels compute per pair of the call, for each block size."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], float] = {}

    def of(self, variant: Variant, block_m: int, block_n: int) -> float:
        """The number for the example tensors and scalars, at one head."""
        key = (variant.name, block_m, block_n)
        if key not in self._found:
            self._found[key] = 1.0 if variant.mask is None else self._counted(variant, block_m, block_n)
        return self._found[key]

    @staticmethod
    def _counted(variant: Variant, block_m: int, block_n: int) -> float:
        length = _MODEL_SEQ
        call = make_call(variant, q_len=length, kv_len=length, q_offset=0, batch=0, head=0, scalars={}, files={})
        assert variant.mask is not None
        statuses = proven(variant.mask, Grid(call=call, block_m=block_m, block_n=block_n))
        return float((statuses != Status.EMPTY).mean())


def _work(variant: Variant, group: Group, visits: Visits) -> Work:
    """The call that candidates are ordered for: the middle one of the timed calls."""
    batch, heads = max(1, TOKENS // _MODEL_SEQ), max(1, WIDTH // group.head_dim)

    def programs(block_m: int, block_n: int) -> int:
        block = block_n if group.pass_ is Pass.DKDV else block_m
        return -(-_MODEL_SEQ // block) * batch * heads

    return Work(
        multiprocessors=multiprocessors(),
        visited=lambda block_m, block_n: visits.of(variant, block_m, block_n),
        programs=programs,
    )
