"""The stored benchmark runs, and which of them the pages show: the latest of each suite and GPU."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.record import OURS, PASSES, Results, load
from docs.generators import ROOT

FOLDER = ROOT / "bench" / "results"

OTHERS = ("packed", "decode", "models", "parallel", "jax", "host")
"""Suites other than speed suites. A run holds the results of each under the suite's own key."""

ALONE = ("variants",)
"""Suites that compare with no other library."""

UNNAMED = "paper"
"""The speed suite of runs that do not store the name of their suite."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stored run: `results` of `path`, measured on `date` (YYYY-MM-DD) on a GPU whose folder is `gpu`."""

    path: Path
    gpu: str
    date: str
    results: Results

    @property
    def device(self) -> str:
        return self.results.machine.get("gpu", self.gpu)

    @property
    def revision(self) -> str:
        """The commit whose kernels were measured; empty if the run does not say."""
        return self.results.machine.get("revision", "")

    @property
    def order(self) -> tuple[str, str, str]:
        """Later runs compare greater."""
        return self.date, self.results.machine.get("revision_date", ""), self.path.stem

    @property
    def link(self) -> str:
        """The file, from the root of the checkout."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def command(self) -> str:
        """The command that measured the run; empty if the run does not say."""
        arguments = list(self.results.settings.get("arguments", []))
        if "--json" in arguments:
            at = arguments.index("--json")
            del arguments[at : at + 2]
        quoted = (f"'{word}'" if re.search(r"[^\w,./=-]", word) else word for word in arguments)
        return " ".join(["python -m bench", *quoted]) if arguments else ""

    def suites(self) -> dict[str, list[str]]:
        """Suite -> names of its measured cases; an empty list for suites other than speed suites."""
        panels = self.results.panels() if self.results.measurements else {}
        found = {(UNNAMED if suite == "all" else suite): cases for suite, cases in panels.items()}
        return found | {name: [] for name in OTHERS if name in self.results.others}

    def measured(self, suite: str) -> set[tuple[str, str]]:
        """Case and implementation of each measured time of a suite."""
        if suite in OTHERS:
            return {(row["case"], row["implementation"]) for row in self.results.others[suite]}
        cases = set(self.suites()[suite])
        return {(m.case, m.implementation) for m in self.results.measurements if m.case in cases and m.ms}


@cache
def stored_runs() -> tuple[Run, ...]:
    """Every stored run, the latest first."""
    found = []
    for path in sorted(FOLDER.glob("*/*.json")):
        date = path.stem[:10]
        found.append(Run(path=path, gpu=path.parent.name, date=date, results=load(path)))
    return tuple(sorted(found, key=lambda run: run.order, reverse=True))


def suites() -> list[str]:
    """The names of all suites that have a run."""
    return list(dict.fromkeys(suite for run in stored_runs() for suite in run.suites()))


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The part of a run that a page shows: a suite's cases and implementations that no later run on the GPU has."""

    run: Run
    suite: str
    new: frozenset[tuple[str, str]]

    @property
    def cases(self) -> list[str]:
        with_news = {case for case, implementation in self.new if implementation != OURS} or {c for c, _ in self.new}
        return [case for case in self.run.suites()[self.suite] if case in with_news]

    def ratios(self) -> dict[tuple[str, str], dict[str, float]]:
        """Peer and pass -> case -> the peer's time over ours."""
        timed = self.run.results.timed()
        found: dict[tuple[str, str], dict[str, float]] = {}
        for case in self.cases:
            for peer in sorted(implementation for name, implementation in self.new if name == case):
                for which in PASSES:
                    ours, theirs = timed.get((case, which, OURS)), timed.get((case, which, peer))
                    if peer != OURS and ours and ours.ms and theirs and theirs.ms:
                        found.setdefault((peer, which), {})[case] = theirs.ms / ours.ms
        return found


def shown_runs(suite: str) -> Iterator[Shown]:
    """The parts of all runs that a suite's page shows, the latest first."""
    seen: dict[str, set[tuple[str, str]]] = {}
    for run in stored_runs():
        if suite not in run.suites():
            continue
        new = run.measured(suite) - seen.setdefault(run.gpu, set())
        seen[run.gpu] |= new
        if new and (suite in ALONE or any(implementation != OURS for _, implementation in new)):
            yield Shown(run=run, suite=suite, new=frozenset(new))


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))
