"""Looks at the kernels of one call: compiles them and judges each. Runs in a worker process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from codegen.analysis.call_modes import Mode
from codegen.arch.tile_rules import TileConfig
from codegen.compile.offline import Compiled, compile_launches
from codegen.compile.packages import imported
from codegen.lint.jobs import Job
from codegen.lint.kernels import Usage, errors, usage, warnings
from codegen.spec.model import KERNEL_ENDINGS, Pass, Variant


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, with what a worker needs for it: the variant, and the folder of the package."""

    job: Job
    variant: Variant
    package: Path


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kernel of a job. `usage` is None if it did not compile; `config` if it has none, as small kernels."""

    kernel: str
    job: Job
    config: TileConfig | None = None
    usage: Usage | None = None
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def look_at(task: Task) -> list[Finding]:
    """The kernels of a job, in the order in which they were launched."""
    from codegen.lint.calls import run_call  # imports torch

    job = task.job
    package = imported(task.package)
    wanted = {p for p, _ in job.configs}
    failures: list[tuple[str, Exception]] = []
    # Triton prints the code that an assembler refused.
    with contextlib.redirect_stdout(io.StringIO()):
        compiled = compile_launches(
            lambda: run_call(task.variant, job, package),
            job.variant,
            job.arch,
            package,
            only=lambda name: pass_of(name) in {None, *wanted},
            on_failure=lambda name, error: failures.append((name, error)),
        )
        found = [_finding(name, job, kernel) for name, kernel in compiled.items()]
    return found + [failed(name, job, error) for name, error in failures]


def failed(kernel: str, job: Job, error: Exception) -> Finding:
    """A kernel that did not compile."""
    lines = str(error).strip().splitlines() or [""]
    message = f"does not compile: {type(error).__name__}: {lines[0]}"
    return Finding(kernel=kernel, job=job, config=_config(kernel, job), errors=(message,))


def main_kernel(job: Job) -> str:
    """The name of the kernel of the first of a job's passes."""
    mode = "" if job.mode is Mode.DENSE else f"_{job.mode}"
    ending = KERNEL_ENDINGS[job.configs[0][0]]
    if job.family:
        ending = f"_{job.family}{ending.removesuffix('_dkdv')}"
    return f"{job.variant}{mode}{ending}"


def _finding(name: str, job: Job, kernel: Compiled) -> Finding:
    used = usage(kernel, job.arch)
    multiplies_halves = pass_of(name) is not None and job.dtype != "float32"
    return Finding(
        kernel=name,
        job=job,
        config=_config(name, job),
        usage=used,
        errors=tuple(errors(used, job.arch)),
        warnings=tuple(warnings(used, multiplies_halves=multiplies_halves)),
    )


def _config(name: str, job: Job) -> TileConfig | None:
    return next((tile for p, tile in job.configs if p is pass_of(name)), None)


def pass_of(name: str) -> Pass | None:
    """The pass of the kernel of this name; None of a small one."""
    # dq is in Hopper's backward, too.
    if name.endswith(("_hopper_bwd", "_hopper_bwd_wide")):
        return Pass.DKDV
    return next((p for p, ending in KERNEL_ENDINGS.items() if name.endswith(ending)), None)
