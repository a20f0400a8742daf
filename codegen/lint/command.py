"""The command `lint`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch  # noqa: F401 - compiling needs both; a missing one is reported before any work
import triton  # noqa: F401

from codegen.analysis.call_modes import Mode
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM
from codegen.compile.pool import WorkerDiedError, spread
from codegen.lint import report
from codegen.lint.jobs import HALF_DTYPE, Selection, jobs, tuned_jobs
from codegen.lint.look import Finding, Task, failed, look_at, main_kernel
from codegen.spec.model import DTYPES, Pass, Spec
from codegen.util.errors import CodegenError, did_you_mean
from codegen.util.terminal import StatusLine, print_coloured


def selection(spec: Spec, args: argparse.Namespace) -> Selection:
    """The selection of a command line; raises `CodegenError` for an unknown name."""
    return Selection(
        variants=_chosen("VARIANT", args.names, spec.variants) or tuple(spec.variants),
        archs=_listed("--arch", args.arch, spec.archs) or tuple(spec.archs),
        dtypes=_listed("--dtype", args.dtype, DTYPES) or _default_dtypes(spec),
        head_dims=_head_dims(args.head_dim),
        passes=[Pass(name) for name in _listed("--passes", args.passes, [p.value for p in Pass])] or tuple(Pass),
        modes=[Mode(name) for name in _listed("--modes", args.modes, [m.value for m in Mode])] or tuple(Mode),
        fast=args.fast,
        tuned=args.tuned,
    )


def run(spec: Spec, package: Path, selected: Selection, processes: int) -> tuple[list[Finding], float]:
    """Compile and judge the selected kernels; returns the findings and the seconds that it took."""
    folder = package.resolve()
    chosen = jobs(spec, selected)
    if selected.tuned:
        chosen += tuned_jobs(folder / "tuned", selected, chosen)
    tasks = [Task(job=job, variant=spec.variants[job.variant], package=folder) for job in chosen]
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
    alone = [replace(task, job=replace(task.job, configs=(entry,))) for task in died for entry in task.job.configs]
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


def _default_dtypes(spec: Spec) -> tuple[str, ...]:
    """One 16-bit dtype, which stands for both, and float32, if the spec has them."""
    halves = [dtype for dtype in spec.defaults.dtypes if dtype != "float32"]
    half = HALF_DTYPE if HALF_DTYPE in halves else next(iter(halves), None)
    return tuple(d for d in (half, "float32" if "float32" in spec.defaults.dtypes else None) if d is not None)


def _listed(option: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    """The names of a list such as `sm_80,sm_90`; empty if the option was not given."""
    return () if text is None else _chosen(option, text.split(","), known)


def _chosen(option: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    known = tuple(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or ""
            raise CodegenError(f"{option}: expected names among {', '.join(known)}, got '{name}'{hint}")
    return tuple(dict.fromkeys(names))


def _head_dims(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isdecimal() and MIN_HEAD_DIM <= int(word) <= MAX_HEAD_DIM for word in words):
        expected = f"integers from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} such as 64,80"
        raise CodegenError(f"--head-dim: expected {expected}, got '{text}'")
    return tuple(dict.fromkeys(map(int, words)))
