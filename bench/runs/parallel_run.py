"""Shared by the parts of the parallel suite: the task of a process, and the rows of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.cases.parallel import Job, ParallelCase, jobs, replays
from bench.peers.parallel_ours import machine_of, make_plan, strategies
from bench.record import ParallelMeasurement

PASSES = ("fwd", "fwd+bwd")


class Run:
    """The task of a rank, and the file to which it writes its messages."""

    def __init__(self, spec: dict[str, Any], rank: int, path: Path) -> None:
        self.spec, self.rank = spec, rank
        self.size, self.device, self.is_tiny = spec["ranks"], spec["device"], spec["tiny"]
        self.machine = machine_of(spec["machine"])
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self._file = path.open("w", encoding="utf-8")
        self.grids: dict[int, Any] = {}  # meshes of two dims, by their nodes
        # One GPU's milliseconds by case and pass, those included that earlier processes of this run measured.
        self.one_ms: dict[str, dict[str, float]] = dict(spec["one_ms"])

    def say(self, **what: Any) -> None:
        """Write a line for the parent. Only the first rank writes rows."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def todo(self) -> list[Job]:
        """The jobs that the parent names, in its order."""
        every = [*jobs(self.size, is_tiny=self.is_tiny), *replays(self.spec["replay"], is_tiny=self.is_tiny)]
        by_name = {job.name: job for job in every}
        return [by_name[name] for name in self.spec["jobs"]]


Rows = Iterator[ParallelMeasurement]


def row_of(run: Run, section: str, case: str, implementation: str, **more: Any) -> ParallelMeasurement:
    """A row; `ranks` is the number of ranks of the run if it is not given."""
    ranks = more.pop("ranks", run.size)
    name = f"{case} P{ranks}"
    return ParallelMeasurement(section=section, case=name, implementation=implementation, ranks=ranks, **more)


def chosen(
    run: Run, section: str, case: ParallelCase, ranks: int, asked: Sequence[str] = ()
) -> tuple[list[str], list[ParallelMeasurement]]:
    """The strategies for a case, all or those `asked` for, and a row for each that the library refuses.

    The first is the strategy that "auto" chooses.
    """
    found: list[str] = []
    refused: list[ParallelMeasurement] = []
    for name in dict.fromkeys(["auto", *(asked or strategies())]):
        try:
            strategy = make_plan(case, ranks, name, run.machine).strategy
        except (ValueError, NotImplementedError) as error:
            why = f"refused: {str(error).rpartition(', got ')[2]}"
            refused.append(row_of(run, section, str(case), name, ranks=ranks, remark=why))
            continue
        if name == "auto":
            found.append(strategy)
        elif name not in found:
            found.append(name)
    return found, refused


def timed(
    case: ParallelCase, row: ParallelMeasurement, rank_ms: dict[str, list[float]], one_ms: dict[str, float]
) -> ParallelMeasurement:
    """A row with the times of every rank, and the scaling, imbalance and rates that follow from them."""
    slowest = {which: max(times) for which, times in rank_ms.items()}
    return replace(
        row,
        ms=slowest,
        rank_ms=rank_ms,
        one_ms=one_ms,
        scaling={which: one_ms[which] / row.ranks / ms for which, ms in slowest.items() if which in one_ms},
        imbalance={which: max(times) / (sum(times) / len(times)) - 1 for which, times in rank_ms.items()},
        tflops={which: case.flops(which) / ms / 1e9 for which, ms in slowest.items()},
    )
