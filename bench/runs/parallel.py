"""The parallel suite: several GPUs of one host. It starts a process for each, and keeps their results.

The processes may crash or hang. So the parent reads their lines, and ends all of them if one fails or if none writes a
line for long. Then it notes the job in which that happened, and starts them again for the remaining jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.cases.parallel import JAX_PEERS, PARTS, Job, jobs, replays
from bench.record import ParallelMeasurement
from bench.timing.clock import Clock

RANKS_MODULE, JAX_MODULE = "bench.runs.parallel_ranks", "bench.runs.parallel_jax"
PATIENCE_S, SILENCE_S, STARTS = 100.0, 200.0, 4
"""Seconds that a rank waits for others, seconds that all may be silent, and how often processes are started."""

JAX_S = 130.0
"""Seconds of a run that are reserved for JAX."""

ENDING_S = 20.0
"""Seconds at the end of a run in which no job starts, for the record and the tables."""

LEAVING_S = 15.0
"""Seconds that processes have to end after their last job; NCCL may still wait there for an operation that failed."""

Keep = Callable[[list[dict[str, Any]]], None]


@dataclass(kw_only=True)
class Plan:
    """What a run measures. `device` is "cuda" or "cpu"; `machine` has rates for the cost model, by name."""

    ranks: int
    device: str
    jobs: list[Job]
    with_jax: bool = False
    replay: tuple[int, ...] = ()
    machine: Mapping[str, float] = field(default_factory=dict)
    jax_peers: tuple[str, ...] = JAX_PEERS
    patience: float = PATIENCE_S
    silence: float = SILENCE_S


def plan(
    ranks: int,
    device: str,
    *,
    parts: Sequence[str] = PARTS,
    only: Any = None,
    peers: Sequence[str] | None = None,
    replay: Sequence[int] = (),
    machine: Mapping[str, float] | None = None,
) -> Plan:
    """The plan of a run. `only`: a pattern of job names. `peers`: those wanted, None for all. A CPU has tiny cases."""
    is_tiny = device == "cpu"
    if replay:
        found = replays(replay, is_tiny=is_tiny)
    else:
        found = [job for job in jobs(ranks, is_tiny=is_tiny) if job.part in parts]
        if peers is not None:
            found = [job for job in found if job.part != "peers" or set(job.implementations) & set(peers)]
    if only is not None:
        found = [job for job in found if only.search(job.name)]
    with_jax = not replay and "jax" in parts and (only is None or bool(only.search("jax")))
    jax_peers = tuple(name for name in JAX_PEERS if peers is None or name in peers)
    given = dict(machine or {})
    count = 1 if replay else ranks
    return Plan(
        ranks=count,
        device=device,
        jobs=found,
        with_jax=with_jax,
        replay=tuple(replay),
        machine=given,
        jax_peers=jax_peers,
    )


class Processes:
    """Processes of one module, each started with a specification and its number, and the lines that they write."""

    def __init__(
        self, module: str, spec: dict[str, Any], count: int, folder: Path, environment: dict[str, str]
    ) -> None:
        path = folder / f"{module.rpartition('.')[2]}-{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        self._outputs = [Path(f"{path}.{rank}") for rank in range(count)]
        self._read = [0] * count
        self._errors = [Path(f"{output}.err") for output in self._outputs]
        self._processes = []
        for rank, errors in enumerate(self._errors):
            with errors.open("w", encoding="utf-8") as file:
                command = [sys.executable, "-m", module, str(path), str(rank)]
                self._processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))

    def lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The lines since the last call, each with the rank that wrote it."""
        for rank, output in enumerate(self._outputs):
            if not output.exists():
                continue
            with output.open("rb") as file:
                file.seek(self._read[rank])
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[rank] += len(whole) + 1
                for line in whole.splitlines():
                    yield rank, json.loads(line)

    @property
    def codes(self) -> list[int | None]:
        """The exit status of each; None while it runs."""
        return [process.poll() for process in self._processes]

    def end(self) -> None:
        """End all that still run: with SIGTERM, and after 5 s with SIGKILL."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def error(self) -> str:
        """The last line on stderr of a process that failed."""
        codes = self.codes
        order = sorted(range(len(codes)), key=lambda rank: codes[rank] in (0, None, -15))
        for rank in order:
            text = self._errors[rank].read_text(encoding="utf-8", errors="replace").strip()
            if text and codes[rank] not in (0, -15):
                return f"rank {rank}: {text.splitlines()[-1][:200]}"
        return f"exit statuses {codes}"


class _Jobs:
    """The jobs of processes, as far as their lines tell.

    Attributes:
        left: the jobs that have not ended. now: the job that runs, or "". lost: the first error of a rank, or "".
        heard: the time of the last line.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.left, self.now, self.lost, self.heard = list(names), "", "", time.monotonic()

    def hear(self, rank: int, line: Mapping[str, Any]) -> None:
        """Note a line of a rank. The first rank says which job runs."""
        self.heard = time.monotonic()
        if "lost" in line:
            self.lost = self.lost or f"rank {rank}: {line['lost']}"
        if rank != 0:
            return
        self.now = line.get("begin", self.now)
        done = line.get("end", line.get("skipped"))
        if done is not None:
            self.left, self.now = [name for name in self.left if name != done], ""


class Suite:
    """One run of the suite."""

    def __init__(self, what: Plan, keep: Keep, clock: Clock) -> None:
        self.what, self.keep, self.clock = what, keep, clock
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def run(self) -> None:
        """Run all jobs for which there is time."""
        with tempfile.TemporaryDirectory() as folder:
            self._in_torch(Path(folder))
            if self.what.with_jax:
                self._in_jax(Path(folder))

    def _deadline(self, kept: float) -> float:
        """The time, by `time.time`, after which no job starts; 0 if there is no limit."""
        left = self.clock.at(1.0)
        return 0.0 if left is None else time.time() + left - time.monotonic() - kept

    def _add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows += rows
        self.keep(self.rows)
        for row in rows:
            print(f"  {said(row)}", flush=True)

    def _lost(self, job: str, note: str) -> None:
        part, _, case = job.partition(" ")
        name = case or part
        self._add(
            [vars(ParallelMeasurement(section=part, case=name, implementation="all", ranks=self.what.ranks, note=note))]
        )

    def _in_torch(self, folder: Path) -> None:
        left = [job.name for job in self.what.jobs]
        for _ in range(STARTS):
            if not left:
                return
            deadline = self._deadline(ENDING_S + (JAX_S if self.what.with_jax else 0))
            if deadline and time.time() > deadline:
                break
            left = self._once(folder, left, deadline)
        if left:
            self.skipped += left
            print(f"skipped: {', '.join(left)}", flush=True)

    def _once(self, folder: Path, names: list[str], deadline: float) -> list[str]:
        """Start all ranks for some jobs; returns the jobs that are left when the ranks end."""
        from torch import distributed

        what, dist = self.what, cast("Any", distributed)  # TCPStore is in no __all__
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if what.ranks > 1 else None
        one_ms = {row["case"].rpartition(" ")[0]: row["one_ms"] for row in self.rows if row["section"] == "ours"}
        spec = {
            "ranks": what.ranks,
            "device": what.device,
            "tiny": what.device == "cpu",
            "port": store.port if store is not None else 0,
            "jobs": names,
            "replay": what.replay,
            "machine": dict(what.machine),
            "deadline": deadline,
            "patience": what.patience,
            "one_ms": {case: ms for case, ms in one_ms.items() if ms},
        }
        processes = Processes(RANKS_MODULE, spec, what.ranks, folder, dict(os.environ))
        return self._watched(processes, names)

    def _watched(self, processes: Processes, names: list[str]) -> list[str]:
        """Read the lines of processes until these end or are silent for too long; returns the jobs that are left."""
        jobs, end = _Jobs(names), self.clock.at(1.0)
        last = None if end is None else end - ENDING_S / 2
        try:
            why = None
            while why is None:
                codes = processes.codes
                for rank, line in processes.lines():
                    jobs.hear(rank, line)
                    if rank == 0:
                        self._take(line)
                why = self._why_to_end(processes, codes, jobs, last)
                time.sleep(0.1 if why is None else 0.0)
        finally:
            processes.end()
        lost = jobs.lost or why
        if lost:
            # Without a current job the processes did not start. Give up the first job, or this would never end.
            now = jobs.now or (jobs.left[0] if jobs.left else "")
            print(f"the ranks ended in {now or 'no job'}: {lost}", flush=True)
            if now:
                self._lost(now, lost)
                return [name for name in jobs.left if name != now]
        return jobs.left

    def _take(self, line: Mapping[str, Any]) -> None:
        """Keep and print what the first rank says."""
        if "begin" in line:
            print(line["begin"], flush=True)
        elif "rows" in line:
            self._add(line["rows"])
        elif "skipped" in line:
            self.skipped.append(line["skipped"])
            print(f"{line['skipped']}: skipped, out of time", flush=True)

    def _why_to_end(
        self, processes: Processes, codes: Sequence[int | None], jobs: _Jobs, last: float | None
    ) -> str | None:
        """The error that ends the processes, or "" if they have ended as they should; None if they are to go on.

        codes: their exit statuses before their last lines were read. last: the time at which they have to end.
        """
        silent = time.monotonic() - jobs.heard
        if all(code == 0 for code in codes):
            return ""
        if any(code not in (0, None) for code in codes):
            return processes.error()
        if not jobs.left and silent > LEAVING_S:
            return ""
        if silent > self.what.silence:
            return f"no rank said anything for {self.what.silence:.0f} s"
        return "out of time" if last is not None and time.monotonic() > last else None

    def _in_jax(self, folder: Path) -> None:
        """Run the JAX part in a process of its own, which uses all GPUs."""
        left = self.clock.at(1.0)
        if left is not None and left - time.monotonic() < ENDING_S + 30:
            print("jax: skipped, out of time", flush=True)
            self.skipped.append("jax")
            return
        what = self.what
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if what.device == "cpu":
            environment |= {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={what.ranks}",
            }
        spec = {
            "ranks": what.ranks,
            "tiny": what.device == "cpu",
            "peers": what.jax_peers,
            "machine": dict(what.machine),
            "deadline": self._deadline(ENDING_S),
        }
        processes = Processes(JAX_MODULE, spec, 1, folder, environment)
        self._watched(processes, ["jax"])

    def right(self) -> bool:
        """True if every row of ours was measured, and is right."""
        ours = ("ours", "exact", "replay")
        return not any(
            row["note"] for row in self.rows if row["section"] in ours or row["implementation"].startswith("ours")
        )


def said(row: Mapping[str, Any]) -> str:
    """A row as one line, which is printed while the run goes on."""
    head = f"{row['section']} {row['case']} {row['implementation']}:"
    if row["note"]:
        return f"{head} {row['note']}"
    if row["gb_per_s"] is not None:
        return f"{head} {row['gb_per_s']:.1f} GB/s"
    parts = [f"{which} {ms:.3f} ms" for which, ms in row["ms"].items()]
    parts += [f"{which} scaling {share:.1%}" for which, share in row["scaling"].items()]
    parts += [f"same bits: {' '.join(name for name, same in row['bits'].items() if same) or 'none'}"] * bool(
        row["bits"]
    )
    parts += [row["source"]] * (row["source"] != "measured") + [row["remark"]] * bool(row["remark"])
    return f"{head} {', '.join(parts)}"


def run(what: Plan, keep: Keep, clock: Clock) -> tuple[bool, list[str]]:
    """Measure; `keep` gets all rows after each job. True if ours is right, and the jobs for which there was no time."""
    suite = Suite(what, keep, clock)
    suite.run()
    return suite.right(), suite.skipped
