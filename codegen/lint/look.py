"""Compiles the kernels of one call and checks the resources of each. Runs in a worker process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from codegen.analysis.call_modes import Mode
from codegen.arch.paged import PagedPass
from codegen.arch.tile_rules import TileConfig
from codegen.compile.offline import Compiled, compile_launches
from codegen.compile.packages import imported
from codegen.lint.jobs import Job
from codegen.lint.kernels import Usage, errors, usage, warnings
from codegen.lint.paged_jobs import PagedJob, pipeline_warnings
from codegen.plan.paged.kernels import paged_plan
from codegen.spec.model import KERNEL_ENDINGS, Pass, Variant


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, with what a worker needs for it: the variant, and the folder of the package."""

    job: Job | PagedJob
    variant: Variant
    package: Path


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kernel of a job. `usage` is None if it did not compile; `config` is None for small kernels."""

    kernel: str
    job: Job | PagedJob
    config: TileConfig | None = None
    usage: Usage | None = None
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def pass_name(self) -> str:
        """The pass of the kernel; `-` for a small kernel."""
        if self.config is None:
            return "-"
        return str(self.job.pass_ if isinstance(self.job, PagedJob) else pass_of(self.kernel))


def look_at(task: Task) -> list[Finding]:
    """The kernels of a job, in the order in which they were launched."""
    from codegen.lint.calls import run_call  # imports torch
    from codegen.lint.paged_calls import run_paged_call

    job = task.job
    package = imported(task.package)

    def call() -> None:
        if isinstance(job, PagedJob):
            run_paged_call(task.variant, job, package)
        else:
            run_call(task.variant, job, package)

    failures: list[tuple[str, Exception]] = []
    # Triton prints the code that an assembler refused.
    with contextlib.redirect_stdout(io.StringIO()):
        compiled = compile_launches(
            call,
            job.variant,
            job.arch,
            package,
            only=lambda name: isinstance(job, PagedJob) or pass_of(name) in {None, *(p for p, _ in job.configs)},
            on_failure=lambda name, error: failures.append((name, error)),
        )
        loops = _loops(task) if isinstance(job, PagedJob) else 0
        found = [_finding(name, job, kernel, loops) for name, kernel in compiled.items()]
    return found + [failed(name, job, error) for name, error in failures]


def failed(kernel: str, job: Job | PagedJob, error: Exception) -> Finding:
    """A kernel that did not compile."""
    lines = str(error).strip().splitlines() or [""]
    message = f"does not compile: {type(error).__name__}: {lines[0]}"
    return Finding(kernel=kernel, job=job, config=_config(kernel, job), errors=(message,))


def main_kernel(job: Job | PagedJob) -> str:
    """The name of the kernel of the first of a job's passes."""
    if isinstance(job, PagedJob):
        return f"{job.variant}{job.ending}"
    mode = "" if job.mode is Mode.DENSE else f"_{job.mode}"
    ending = KERNEL_ENDINGS[job.configs[0][0]]
    if job.family:
        ending = f"_{job.family}{ending.removesuffix('_dkdv')}"
    return f"{job.variant}{mode}{ending}"


def _loops(task: Task) -> int:
    """Number of loops over keys in the portable kernel on pages; that for prompts has one more for unmasked blocks."""
    planned = paged_plan(task.variant)
    has_two = isinstance(task.job, PagedJob) and task.job.pass_ is PagedPass.PAGED_FWD
    return 2 if has_two and planned is not None and planned.full is not None else 1


def _finding(name: str, job: Job | PagedJob, kernel: Compiled, loops: int) -> Finding:
    used, config = usage(kernel, job.arch), _config(name, job)
    found = warnings(used, multiplies_halves=config is not None and job.dtype != "float32")
    if isinstance(job, PagedJob) and config is not None:
        found += pipeline_warnings(used, job, loops)
    return Finding(
        kernel=name,
        job=job,
        config=config,
        usage=used,
        errors=tuple(errors(used, job.arch)),
        warnings=tuple(found),
    )


def _config(name: str, job: Job | PagedJob) -> TileConfig | None:
    if isinstance(job, PagedJob):
        return job.tile if name.endswith(job.ending) else None
    return next((tile for p, tile in job.configs if p is pass_of(name)), None)


def pass_of(name: str) -> Pass | None:
    """The pass of the kernel of this name; None for a small kernel."""
    name = name.removesuffix("_wide")
    # Hopper's backward computes dq, too, but has the config of dkdv.
    if name.endswith(("_hopper_bwd", "_hopper_split_keys", "_hopper_split_rows")):
        return Pass.DKDV
    return next((p for p, ending in KERNEL_ENDINGS.items() if name.endswith(ending)), None)
