"""The command `lint`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch  # noqa: F401 - compiling needs both; a missing one is reported before any work
import triton  # noqa: F401

from codegen.analysis.call_modes import Mode
from codegen.arch.paged import PagedPass
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM
from codegen.compile.offline import check_not_interpreted
from codegen.compile.pool import WorkerDiedError, spread
from codegen.lint import report
from codegen.lint.jobs import Job, Selection, default_dtypes, jobs, tuned_jobs
from codegen.lint.look import Finding, Task, failed, look_at, main_kernel
from codegen.lint.paged_jobs import PagedJob, paged_jobs, single_jobs
from codegen.plan.kernel_files import PAGED
from codegen.spec.model import DTYPES, Pass, Spec
from codegen.util.choices import checked_names, listed_names
from codegen.util.errors import CodegenError
from codegen.util.terminal import StatusLine, print_coloured


def selection(spec: Spec, args: argparse.Namespace) -> Selection:
    """The selection of a command line; raises `CodegenError` for an unknown name, and if nothing can be compiled."""
    check_not_interpreted()
    passes = listed_names("--passes", args.passes, [*Pass, *PagedPass]) or (*Pass, *PagedPass)
    modes = listed_names("--modes", args.modes, [*Mode, PAGED]) or (*Mode, PAGED)
    return Selection(
        variants=checked_names("variant", args.names, spec.variants) or tuple(spec.variants),
        archs=listed_names("--arch", args.arch, spec.chips) or tuple(spec.archs),
        dtypes=listed_names("--dtype", args.dtype, DTYPES) or default_dtypes(spec),
        head_dims=_head_dims(args.head_dim),
        passes=[each for each in Pass if each in passes],
        modes=[each for each in Mode if each in modes],
        paged=[each for each in PagedPass if each in passes and PAGED in modes],
        fast=args.fast,
        tuned=args.tuned,
    )


def run(spec: Spec, package: Path, selected: Selection, processes: int) -> tuple[list[Finding], float]:
    """Compile and judge the selected kernels; returns the findings and the seconds that it took."""
    folder = package.resolve()
    chosen = jobs(spec, selected)
    if selected.tuned:
        chosen += tuned_jobs(folder / "tuned", selected, chosen)
    every: list[Job | PagedJob] = [*chosen, *paged_jobs(spec, selected, folder / "tuned")]
    tasks = [Task(job=job, variant=spec.variants[job.variant], package=folder) for job in every]
    start = time.monotonic()
    findings: list[Finding] = []
    died: list[Task] = []
    with StatusLine(len(tasks)) as status:
        status.show("calls compiled")
        for task, result in spread(look_at, tasks, processes):
            if isinstance(result, WorkerDiedError):
                died.append(task)
            else:
                findings += _found(task, result)
            status.done += 1
            status.show("calls compiled")
    # One kernel of each of these tasks crashes the compiler: compile them one by one.
    alone = [replace(task, job=job) for task in died for job in single_jobs(task.job)]
    for task, result in spread(look_at, alone, processes):
        findings += _found(task, result)
    return report.without_repetition(findings), time.monotonic() - start


def _found(task: Task, result: list[Finding] | Exception) -> list[Finding]:
    if isinstance(result, CodegenError):
        raise result
    if isinstance(result, Exception):
        return [failed(main_kernel(task.job), task.job, result)]
    return result


def print_report(findings: Sequence[Finding], seconds: float) -> None:
    for line in [*report.lines(findings), *report.summary(findings, seconds)]:
        print_coloured(line, report.STYLES)


def save(path: Path, findings: Sequence[Finding]) -> None:
    report.save_json(path, findings, version("triton"))


def _head_dims(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isdecimal() and MIN_HEAD_DIM <= int(word) <= MAX_HEAD_DIM for word in words):
        expected = f"integers from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} such as 64,80"
        raise CodegenError(f"--head-dim: expected {expected}, got '{text}'")
    return tuple(dict.fromkeys(map(int, words)))
