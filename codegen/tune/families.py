"""Decides which kernel family is faster, portable or Hopper: checks and times both side by side.

Nothing is searched here: portable kernels run with the tiles that calls would use, and Hopper's family has one tile
per length.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from codegen.arch.hopper import NAME as FAMILY
from codegen.arch.tile_rules import TileConfig
from codegen.plan.ops.arguments import mask_arguments, own_arguments
from codegen.spec.model import Pass
from codegen.tune.compiling import SMALL_HEADS, WHOLE_SEQ, Compilation, Compilers, HopperTask, Task, fault_of
from codegen.tune.measuring import Contender, FamilyBench, timed_heads
from codegen.tune.record import Comparison, Judgement, PassTiles, Verdict, Workload
from codegen.tune.tuner import Context

PORTABLE, HOPPER_DKDV = "portable", "hopper_dkdv"
"""The contenders besides `hopper`, Hopper's kernels alone, by their names in the package's runtime."""

COMPILE_SECONDS = 20.0
"""Seconds that one core of a server takes to compile the contenders of one comparison, to divide a budget."""

MOST_OF_BUDGET = 0.3
"""The largest part of a budget for tiles and families that comparing families may take."""

_SECONDS_A_WORKLOAD = 0.5


@dataclass(frozen=True, kw_only=True)
class FamilyRequest:
    """The comparisons to make. `deadline` is a time of `time.monotonic`."""

    comparisons: Sequence[Comparison]
    workloads: Sequence[Workload]
    deadline: float
    jobs: int


class Families:
    """The kernel families of a package on a machine, asked from the package's own runtime."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._configs, self._families = context.runtime("core.configs"), context.runtime("core.families")
        self._gpu: str = context.runtime("core.tuned").gpu_key(context.machine.gpu)

    def refusal(self, comparison: Comparison) -> str:
        """The reason why there is nothing to compare; empty if both families have the kernels."""
        dims = (comparison.head_dim, comparison.head_dim)
        return str(self._families.refusal(self.context.machine.arch, comparison.dtype, dims, WHOLE_SEQ))

    def depends_on_calls(self, variant: str) -> bool:
        """Whether a call's scalars and tensors decide which blocks it visits: an example says little of other calls."""
        spec = self.context.spec.variants[variant]
        return bool(mask_arguments(spec, own_arguments(spec, {})))

    def kernels(self, comparison: Comparison) -> dict[str, str]:
        """Hashes of the compared kernels, by name."""
        dims = (comparison.head_dim, comparison.head_dim)
        found: dict[str, str] = self._families.contending_kernels(
            comparison.pass_, comparison.variant, comparison.mode, dims
        )
        return found

    def config(self, comparison: Comparison, workload: Workload) -> PassTiles:
        """The tiles of the portable kernels that a call runs with."""
        tiles = self._tiles(comparison, workload.seq, workload.group, PORTABLE)
        passes = (Pass.FWD,) if comparison.pass_ == "fwd" else (Pass.DKDV, Pass.DQ)
        return {pass_: tiles[pass_] for pass_ in passes}

    def contenders(self, comparison: Comparison, workload: Workload) -> list[Contender]:
        """The contenders of a workload: two for a forward, up to three for a backward."""
        own, portable = (self._tiles(comparison, workload.seq, workload.group, family) for family in (FAMILY, PORTABLE))
        heads = timed_heads(comparison.head_dim, workload) if comparison.mode == "packed" else SMALL_HEADS

        def contender(name: str, tiles: PassTiles, own: TileConfig | None = None, seq: int = WHOLE_SEQ) -> Contender:
            family = PORTABLE if own is None else FAMILY
            return Contender(name=name, family=family, tiles=tuple(tiles.items()), own=own, seq=seq, heads=heads)

        if comparison.pass_ == "fwd":
            seq = self._checked_at(comparison, workload, own[Pass.FWD])
            return [
                contender(PORTABLE, {Pass.FWD: portable[Pass.FWD]}),
                contender(FAMILY, {}, own[Pass.FWD], seq),
            ]
        found = [
            contender(PORTABLE, portable),
            contender(HOPPER_DKDV, {Pass.DQ: portable[Pass.DQ]}, own[Pass.DKDV]),
        ]
        if comparison.mode in self.context.runtime("kernels").TRAITS[comparison.variant].fused_modes:
            found.append(contender(FAMILY, {}, own[Pass.DKDV]))
        return found

    def _checked_at(self, comparison: Comparison, workload: Workload, own: TileConfig) -> int:
        """The shortest length at which Hopper's forward uses this tile."""

        def serves(seq: int) -> bool:
            return self._tiles(comparison, seq, workload.group, FAMILY)[Pass.FWD] == own

        seq = WHOLE_SEQ
        while seq < workload.seq and not serves(seq):
            seq *= 2
        return seq if serves(seq) else workload.seq

    def ruled(self, comparison: Comparison, workload: Workload) -> str:
        """The contender that the built-in rule selects."""
        dims = (comparison.head_dim, comparison.head_dim)
        return str(self._families.as_a_rule(comparison.pass_, comparison.variant, comparison.mode, dims, workload.seq))

    def taken(self, times: Mapping[str, float], ruled: str) -> str:
        """The contender that calls will run from now on."""
        return str(self._families.fastest(times, ruled))

    def has_verdicts(self, comparison: Comparison, workloads: Sequence[Workload]) -> bool:
        """True if every workload has a verdict for these kernel hashes and tiles."""
        configs = {workload: self.config(comparison, workload) for workload in workloads}
        return self.context.file(comparison.variant).has_verdicts(comparison, self.kernels(comparison), configs)

    def forget(self) -> None:
        """Make the package read its tuned files again, because tiles may have been added."""
        self.context.runtime("core.tuned").tuned_entries.cache_clear()
        self._configs.tiles_for.cache_clear()

    def _tiles(self, comparison: Comparison, seq: int, group: int, family: str) -> dict[Pass, TileConfig]:
        dims, arch = (comparison.head_dim, comparison.head_dim), self.context.machine.arch
        options = self.context.runtime("core.options").CallOptions(family=family)
        given = (comparison.variant, comparison.mode, arch, self._gpu, comparison.dtype, dims, (group, 1), seq, options)
        with warnings.catch_warnings():
            # Verdicts of other kernels are the reason to compare, so that this needs no warning. Tiles of others do.
            warnings.filterwarnings("ignore", ".*: its families of ", RuntimeWarning)
            tiles = self._configs.tiles_for(*given)
        return {Pass(name): TileConfig(**tile._asdict()) for name, tile in tiles.items()}


@dataclass(kw_only=True)
class Trial:
    """A comparison in progress: contenders by workload, their compilations, and disqualified ones with the reasons."""

    comparison: Comparison
    contenders: Mapping[Workload, Sequence[Contender]]
    compiling: Mapping[Contender, Sequence[Future[Compilation]]]
    failed: dict[Contender, str] = field(default_factory=dict)


class FamilyTuner:
    """Makes the comparisons of a request; `report` gets each result, `note` a text on the current step."""

    def __init__(
        self,
        families: Families,
        request: FamilyRequest,
        report: Callable[[Judgement], None],
        note: Callable[[str], None],
    ) -> None:
        self.families = families
        self.request = request
        self.report = report
        self.note = note
        self.compiled: list[Compilation] = []
        self.measuring = 0.0

    def run(self) -> list[Comparison]:
        """Run the comparisons in order; returns those that the budget left out."""
        with Compilers(self.request.jobs) as pool:
            trials = [self._begin(pool, comparison) for comparison in self.request.comparisons]
            done = 0
            while done < len(trials) and time.monotonic() < self.request.deadline:
                self._judge(trials[done])
                done += 1
            self.compiled = pool.finished()
        return [trial.comparison for trial in trials[done:]]

    def _begin(self, pool: Compilers, comparison: Comparison) -> Trial:
        contenders = {workload: self.families.contenders(comparison, workload) for workload in self.request.workloads}
        each = dict.fromkeys(contender for found in contenders.values() for contender in found)
        compiling = {contender: self._compiled(pool, comparison, contender) for contender in each}
        return Trial(comparison=comparison, contenders=contenders, compiling=compiling)

    def _compiled(self, pool: Compilers, comparison: Comparison, contender: Contender) -> list[Future[Compilation]]:
        """The compilations of a contender's kernels; a backward needs the forward too."""
        package, arch, tiles = self.families.context.package, self.families.context.machine.arch, dict(contender.tiles)
        tasks: list[Task | HopperTask] = [
            Task(
                package=package,
                arch=arch,
                group=comparison.group(pass_),
                tile=tile,
                seq=WHOLE_SEQ,
                heads=contender.heads,
            )
            for pass_, tile in tiles.items()
        ]
        passes = () if contender.own is None else (Pass.FWD, Pass.DKDV)
        tasks += [
            HopperTask(
                package=package,
                arch=arch,
                group=comparison.group(pass_),
                with_dq=pass_ is Pass.FWD or Pass.DQ not in tiles,
                seq=contender.seq,
                heads=contender.heads,
            )
            for pass_ in (passes[:1] if comparison.pass_ == "fwd" else passes)
        ]
        return [pool.submit(task) for task in tasks]

    def _judge(self, trial: Trial) -> None:
        """Check every contender, time the correct ones, and write the verdicts."""
        for contender, futures in trial.compiling.items():
            self.note(f"{trial.comparison}: {contender.name} compiles")
            if fault := next((fault for future in futures if (fault := fault_of(future))), ""):
                trial.failed[contender] = fault
        start = time.monotonic()
        bench = FamilyBench(self.families.context.package, trial.comparison)
        for contender in trial.compiling:
            if contender not in trial.failed and (fault := bench.check(contender)):
                trial.failed[contender] = fault
        verdicts, undecided = [], ""
        for workload in self.request.workloads:
            self.note(f"{trial.comparison}: seq {workload.seq} group {workload.group}")
            verdict = self._verdict(bench, trial, workload)
            if isinstance(verdict, Verdict):
                verdicts.append(verdict)
            else:
                undecided = undecided or verdict
        self.measuring += time.monotonic() - start
        judgement = Judgement(comparison=trial.comparison, verdicts=verdicts, undecided=undecided)
        file = self.families.context.file(trial.comparison.variant)
        file.judge(judgement, self.families.kernels(trial.comparison))
        self.report(judgement)

    def _verdict(self, bench: FamilyBench, trial: Trial, workload: Workload) -> Verdict | str:
        """The times of the correct contenders and the one that calls will run, or the reason for having no verdict.

        If one correct contender cannot be timed, for instance because memory is short, there is no verdict.
        """
        contenders = trial.contenders[workload]
        failed = {each.name: trial.failed[each] for each in contenders if each in trial.failed}
        if len(failed) == len(contenders):
            return next(iter(failed.values()))
        times, untimed = bench.race([each for each in contenders if each not in trial.failed], workload)
        if untimed:
            return next(iter(untimed.values()))
        ruled = self.families.ruled(trial.comparison, workload)
        return Verdict(
            workload=workload,
            ms=times,
            failed=failed,
            config=self.families.config(trial.comparison, workload),
            ruled=ruled,
            taken=self.families.taken(times, ruled),
        )


def reserve(budget: float, comparisons: int, workloads: int, jobs: int) -> float:
    """Seconds of a shared budget that are reserved for comparing families."""
    wanted = comparisons * (COMPILE_SECONDS / jobs + workloads * _SECONDS_A_WORKLOAD)
    return min(wanted, MOST_OF_BUDGET * budget)
