"""The calls whose kernels are compared: calls with default tiles, and calls with the tiles of tuned files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from codegen.arch.tile_rules import TileConfig
from codegen.compile.packages import Package
from codegen.lint.jobs import Job, Selection, jobs, tuned_jobs
from codegen.lint.look import pass_of
from codegen.spec.model import Spec, Variant
from codegen.tune.compiling import HopperTask, Task, call_op

Call = Job | Task | HopperTask
"""One call of an op. The package of a tuning task is replaced by the package that is called."""

DEFAULT_ARCHS = ("sm_80", "sm_90")
"""The chips that are always compared, besides those of tuned files."""


def tuned_archs(package: Path) -> set[str]:
    """The chips that the tuned files of a package are for."""
    return {json.loads(path.read_text(encoding="utf-8"))["arch"] for path in package.glob("tuned/*/*.json")}


def default_calls(spec: Spec, selection: Selection, package: Path) -> list[Job]:
    """The calls of a selection; with `selection.fast` only enough to launch each kernel once on each chip and mode."""
    if selection.fast:
        return _one_per_kernel(jobs(spec, _thorough(selection)))
    found = jobs(spec, selection)
    return found + tuned_jobs(package / "tuned", selection, found) if selection.tuned else found


def _thorough(selection: Selection) -> Selection:
    return Selection(
        variants=selection.variants, archs=selection.archs, dtypes=selection.dtypes[:1], modes=selection.modes
    )


def _one_per_kernel(found: Sequence[Job]) -> list[Job]:
    """The first portable call of each variant, mode and chip; in Hopper's family, one call for each dtype and tile."""
    chosen: dict[object, Job] = {}
    for job in found:
        tile = job.configs[0] if job.family else None
        chosen.setdefault((job.variant, job.mode, job.arch, job.dtype, job.family, tile), job)
    return list(chosen.values())


def arch_of(call: Call) -> str:
    return call.arch


def variant_of(call: Call) -> str:
    return call.variant if isinstance(call, Job) else call.group.variant


def mode_of(call: Call) -> str:
    return str(call.mode if isinstance(call, Job) else call.group.mode)


def is_wanted(call: Call, kernel: str) -> bool:
    """True if a kernel is to be compared in this call. Other calls compare the other kernels that it launches."""
    if isinstance(call, Job):
        return pass_of(kernel) in {None, *(pass_ for pass_, _ in call.configs)}
    return call.is_wanted(kernel)


def run(call: Call, variant: Variant, package: Path, name: str) -> None:
    """Call the op of the package that is imported as `name`."""
    if isinstance(call, Job):
        from codegen.lint.calls import run_call

        run_call(variant, call, name)
    else:
        call_op(replace(call, package=Package(root=str(package.parent), name=name)))


def text_of(call: Call) -> str:
    """A call on a line of a report."""
    if isinstance(call, Job):
        tiles = "; ".join(f"{pass_} {_tile_text(tile)}" for pass_, tile in call.configs)
        length = "" if call.length is None else f", from {call.length} keys"
        return f"{call.arch} {call.dtype} D{call.head_dim} {call.family or 'portable'} ({tiles}{length})"
    tile = f" {_tile_text(call.tile)}" if isinstance(call, Task) else " hopper"
    return f"{call.arch} {call.group} seq {call.seq}{tile}"


def _tile_text(tile: TileConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
