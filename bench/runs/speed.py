"""Plans and runs the speed suites; results are stored after every case."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.cases.case import Case, merged, narrowed, with_peers
from bench.cases.suites import SUITES, Sizes
from bench.peers.installed import missing
from bench.record import OURS, PASSES, TITLES, Measurement, Results
from bench.timing.clock import Clock
from bench.timing.measure import GpuLostError, measure
from bench.timing.warm_compile import compile_all, tasks

BUDGET_MS, QUICK_MS = 150.0, 50.0
"""GPU milliseconds for each implementation and pass, in full and with --quick."""

COMPILE_SHARE = 0.5
"""Largest share of the run's time for compiling in advance."""

CHECK_S = 1.0
"""Estimated seconds to check one case against float64 and draw its inputs."""

START_S = {OURS: 0.8, "flex": 2.5, "flex-max": 4.0, "fa4": 1.0, "fla": 1.0}
"""Estimated seconds of a first call with compiled kernels; 0.3 for other peers."""

COMPILE_S = {OURS: 8.0, "flex": 12.0, "flex-max": 75.0, "fa4": 40.0, "fla": 15.0}
"""Estimated seconds to compile a case in one process. Ours is often compiled already, for another length."""

POOLS_S = 30.0
"""Estimated seconds to start the processes of both pools."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of a run, and the selected peers that are not installed, with their pip names."""

    suites: dict[str, list[str]]
    cases: list[Case]
    missing: dict[str, str]


def plan(options: argparse.Namespace, absent: Callable[[Iterable[str]], dict[str, str]] = missing) -> Plan:
    """The cases of the selected suites, without repetitions."""
    sizes = Sizes(seqs=options.seqs, dims=(128,) if options.quick else (64, 128, 256))
    found: dict[str, list[Case]] = {}
    for suite in SUITES:
        if suite in options.suite:
            # Cases of core without peers are compared with other cases of core, so --peers adds none.
            beside = narrowed if suite == "core" else with_peers
            chosen = [beside(case, options.peers) for case in SUITES[suite](sizes)]
            found[suite] = [case for case in chosen if not options.only or options.only.search(case.name)]
    asked = {peer for cases in found.values() for case in cases for peer in case.peers}
    gone = absent(peer for peer in TITLES if peer in asked)
    cases = merged(with_peers(case, case.peers, gone) for cases in found.values() for case in cases)
    return Plan(
        suites={suite: list(dict.fromkeys(case.name for case in cases)) for suite, cases in found.items()},
        cases=cases,
        missing=gone,
    )


def estimate_s(cases: Sequence[Case], jobs: int, budget_ms: float) -> tuple[float, float]:
    """Estimated seconds of compiling in advance and of measuring, with one core per job.

    A rough guess for an H100: passes longer than their budget take more time, warm caches save most of it.
    """
    compiling = sum(COMPILE_S[name] for kind in tasks(cases).values() for _, name in kind)
    names = [(OURS, *case.peers) for case in cases]
    # With L2 clearing and warm-up a pass takes about twice its budget.
    measuring = sum(CHECK_S + sum(START_S.get(name, 0.3) + 4 * budget_ms / 1e3 for name in each) for each in names)
    return (compiling / jobs + POOLS_S if compiling and jobs > 0 else 0.0), measuring


def describe(chosen: Plan, options: argparse.Namespace) -> str:
    """List the cases with their peers, and the estimated time."""
    width = max((len(case.name) for case in chosen.cases), default=0)
    lines = [f"{case.name:{width}}  {', '.join(case.peers) or '-'}" for case in chosen.cases]
    compiling, measuring = estimate_s(chosen.cases, options.jobs, budget_of(options))
    total = (
        f"{len(lines)} cases: about {compiling:.0f} s to compile with {options.jobs} jobs, {measuring:.0f} s to measure"
    )
    return "\n".join([*lines, total])


def budget_of(options: argparse.Namespace) -> float:
    """GPU milliseconds for each implementation and pass."""
    return QUICK_MS if options.quick else BUDGET_MS


def run(options: argparse.Namespace, chosen: Plan, results: Results, keep: Callable[[], None], clock: Clock) -> None:
    """Measure the cases of a plan into `results`, and call `keep` after each.

    Cases for which time runs out stay in `results.skipped`.
    """
    results.suites = chosen.suites
    results.skipped = [case.name for case in chosen.cases]
    keep()
    results.settings["first_call"] = "compiling included"
    if options.jobs > 0:
        missing = compile_all(chosen.cases, options.jobs, clock.at(COMPILE_SHARE))
        ending = f", {missing}" if missing else ""
        results.settings["first_call"] = f"after compiling beforehand into caches on disk{ending}"
    for number, case in enumerate(chosen.cases, start=1):
        if clock.over:
            print(f"out of time: {len(results.skipped)} cases are skipped", flush=True)
            return
        began = time.monotonic()
        print(f"[{number}/{len(chosen.cases)}] {case.name}", end="", flush=True)
        try:
            rows, costs = measure(case, budget_of(options))
        except GpuLostError as error:
            results.measurements += error.rows
            results.settings["lost"] = str(error)
            keep()
            raise
        except Exception as error:  # even drawing its inputs failed; another case may be smaller
            note = f"{type(error).__name__}: {error}"
            rows, costs = [Measurement(case=case.name, which=p, implementation=OURS, note=note) for p in PASSES], []
        results.measurements += rows
        results.costs += costs
        results.skipped.remove(case.name)
        keep()
        print(f"  ({time.monotonic() - began:.1f} s)", flush=True)
