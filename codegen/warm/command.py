"""The command `warm`."""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401 - compiling needs both; a missing one is reported before any work
from triton import knobs

from codegen.arch.tile_rules import MAX_HEAD_DIM, MAX_PAGED_HEAD_DIM, MIN_HEAD_DIM
from codegen.compile.offline import check_not_interpreted
from codegen.compile.packages import Package, find_package
from codegen.compile.pool import spread
from codegen.inspect.explain import arch_of_gpu
from codegen.inspect.origin import check_origin
from codegen.inspect.tuned_files import this_gpu
from codegen.spec.model import DTYPE_NAMES, DTYPES, Spec
from codegen.testing.calls import load_manifest
from codegen.util.choices import checked_names
from codegen.util.errors import CodegenError
from codegen.util.terminal import StatusLine
from codegen.util.text import aligned
from codegen.warm.calls import CACHES, MODES, PAGED, Layer, Layout, Request, Scales, Target, WarmCall, WarmPass
from codegen.warm.compiling import Kernel, Outcome, compile_task, has_launchers, tasks
from codegen.warm.model import layers_of

LIMIT_S = 900.0
"""Seconds after which a compiler that hangs is killed."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A kernel that did not compile, or a call that its op refuses, and why."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of each kernel, the failures, and the seconds of all together."""

    outcomes: dict[Kernel, Outcome]
    failures: tuple[Failure, ...]
    seconds: float


def target_of(package: Path, gpu: str | None) -> Target:
    """The chip of `--gpu`, a GPU with tuned tiles or an architecture; by default this machine's GPU."""
    name = find_package(package).name
    named = gpu or this_gpu(importlib.import_module(f"{name}._runtime.core.tuned"))
    arch = arch_of_gpu(package, named)
    return Target(arch=arch, gpu="" if named == arch else named)


def request_of(args: argparse.Namespace, package: Path) -> Request:
    """The request of a command line; raises `CodegenError` for what the package does not have."""
    check_not_interpreted()
    name = find_package(package).name
    if bool(args.names) == (args.model is not None):
        raise CodegenError("warm: expected names of variants, or --model CONFIG, and not both")
    modes = checked_names("--modes", args.modes or ["dense"], MODES)
    passes = checked_names("--passes", args.passes or list(WarmPass), list(WarmPass))
    dtypes = checked_names("--dtypes", [DTYPE_NAMES.get(each, each) for each in args.dtypes or ["bf16"]], DTYPES)
    layouts = checked_names("--layout", [args.layout] if args.layout else [], list(Layout))
    if args.model is not None:
        layers = layers_of(args.model, name)
    else:
        variants = checked_names("variant", args.names, load_manifest(name))
        dims = args.head_dims or [(128, 128)]
        layers = tuple(
            Layer(variant=each, heads=args.heads, head_dim=dim, head_dim_v=dim_v)
            for each in variants
            for dim, dim_v in dims
        )
    caches = checked_names("--cache", [args.cache] if args.cache else [], CACHES)
    scales = checked_names("--scales", [args.scales] if args.scales else [], list(Scales))
    if scales and not caches:
        raise CodegenError("--scales: expected only with --cache, got it without")
    if caches and PAGED not in modes:
        raise CodegenError(f"--cache: expected only with --modes paged, got --modes {','.join(modes)}")
    most = MAX_PAGED_HEAD_DIM if modes == (PAGED,) else MAX_HEAD_DIM
    for layer in layers:
        _check(layer, most)
    return Request(
        layers=layers,
        modes=modes,
        dtypes=dtypes,
        seqs=tuple(args.seqs),
        layout=Layout(layouts[0]) if layouts else Layout.BSHD if args.model is not None else Layout.BHSD,
        batch=args.batch,
        page_sizes=tuple(args.page_sizes),
        backward=WarmPass.BACKWARD in passes,
        trained=not args.frozen,
        cache=caches[0] if caches else "",
        scales=Scales(scales[0]) if scales else Scales.NUMBER,
    )


def _check(layer: Layer, most: int) -> None:
    """Refuse numbers of heads that do not divide, and head dims above `most`."""
    heads, kv_heads = layer.heads
    if heads % kv_heads:
        raise CodegenError(f"--heads: expected query heads that are a multiple of key heads, got {heads}/{kv_heads}")
    for dim in (layer.head_dim, layer.head_dim_v):
        if not MIN_HEAD_DIM <= dim <= most:
            raise CodegenError(f"--head-dims: expected {MIN_HEAD_DIM} to {most}, got {dim}")


def run(request: Request, target: Target, package: Path, spec: Spec, jobs: int) -> Report:
    """Compile what is requested; what was compiled before is found in the cache."""
    start = time.monotonic()
    check_cache(Path(knobs.cache.dir))
    found = find_package(package)
    failures: list[Failure] = []
    chosen = tasks(
        [(call, spec.variants[call.variant] if call.mode == PAGED else None) for call in _calls(request, found, spec)],
        target,
        found,
        lambda call, error: failures.append(Failure(what=str(call), reason=_reason(error))),
    )
    outcomes: dict[Kernel, Outcome] = {}
    with StatusLine(len(chosen)) as status:
        status.show("kernels compiled")
        for task, result in spread(compile_task, chosen, jobs, limit=LIMIT_S):
            if isinstance(result, Exception):
                failures.append(Failure(what=f"{task.kernel.name}, of {task.call}", reason=_reason(result)))
            else:
                outcomes[task.kernel] = result
            status.done += 1
            status.show("kernels compiled")
    return Report(outcomes=outcomes, failures=tuple(failures), seconds=time.monotonic() - start)


def check_cache(folder: Path) -> None:
    """Refuse a folder in which Triton can neither find kernels nor store them, before anything is compiled."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One that holds kernels already may be read-only: `warm` then shows whether a kernel is missing.
        if not any(folder.iterdir()):
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        expected = "TRITON_CACHE_DIR: expected a folder that can be written, for Triton's cache"
        raise CodegenError(f"{expected}, got {folder}: {error.strerror}") from None


def _calls(request: Request, package: Package, spec: Spec) -> list[WarmCall]:
    calls = list(request.calls(package.name))
    if not calls:
        raise CodegenError("--modes paged: expected a variant without dropout, got only variants with dropout")
    paged = dict.fromkeys(call.variant for call in calls if call.mode == PAGED)
    check_origin(spec, Path(package.root) / package.name, paged)
    return calls


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def lines(report: Report, target: Target, jobs: int) -> list[str]:
    """The report as text: a line for each kernel, slowest first, the failures, and a summary."""
    every = sorted(report.outcomes.items(), key=lambda each: -each[1].seconds)
    table: Sequence[Sequence[str]] = [
        (kernel.name, "in the cache" if outcome.found else f"{outcome.seconds:.1f} s") for kernel, outcome in every
    ]
    found = sum(outcome.found for outcome in report.outcomes.values())
    counts = [f"{len(every) - found} kernels compiled", f"{found} found in the cache"]
    counts += [f"{len(report.failures)} failed"] if report.failures else []
    place = f"{target.gpu} ({target.arch})" if target.gpu else f"{target.arch}, with its default tiles"
    summary = [f"for {place}: {', '.join(counts)}; {report.seconds:.0f} s, {jobs} processes", f"in {knobs.cache.dir}"]
    if not has_launchers(target):
        summary.append("launchers (C code, about 0.3 s per kernel) are compiled later, on the machine with the GPU")
    failures = [f"failed: {failure.what}: {failure.reason}" for failure in report.failures]
    return [*(aligned(table) if table else []), *failures, *summary]
