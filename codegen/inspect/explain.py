"""The tiles that a call runs with on a GPU, and why. The generated package decides; no GPU is needed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from codegen import PROGRAM
from codegen.analysis.call_modes import Mode
from codegen.arch.chips import ARCHS, CHIPS, GPU_CHIPS
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM
from codegen.compile.packages import find_package
from codegen.spec.model import DTYPES
from codegen.util.choices import checked_names
from codegen.util.errors import CodegenError, did_you_mean
from codegen.util.text import aligned

DTYPE_NAMES = {**{name: name for name in DTYPES}, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Spelling of a dtype in an option -> dtype."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A call to explain. `gpu`: a folder of tuned tiles, such as h100, or an architecture."""

    variant: str
    gpu: str
    dtype: str
    head_dim: int
    seq: int
    group: int
    mode: str


def answer(out: Path, question: Question) -> list[str]:
    """The lines that answer a question about the package in `out`."""
    package = find_package(out).name
    configs = importlib.import_module(f"{package}._runtime.core.configs")
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    hashes = importlib.import_module(f"{package}._runtime.kernels").KERNEL_HASHES
    (variant,) = checked_names("variant", [question.variant], hashes)
    (dtype,) = checked_names("--dtype", [DTYPE_NAMES.get(question.dtype, question.dtype)], DTYPES)
    (mode,) = checked_names("--mode", [question.mode], [str(each) for each in Mode])
    if question.head_dim > MAX_HEAD_DIM:
        raise CodegenError(f"--head-dim: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {question.head_dim}")
    named = question.gpu or _this_gpu(tuned)
    arch = _arch(out, named)
    gpu = "" if named == arch else named
    problem = tuned.Problem(mode, dtype, question.head_dim, question.group, question.seq)
    choices = configs.ladder(variant, arch, gpu, problem)
    path = tuned.tuned_path(gpu, variant, out)
    families = importlib.import_module(f"{package}._runtime.core.families")
    dims, heads = (question.head_dim, question.head_dim), (question.group, 1)
    refusal = families.refusal(arch, dtype, dims, question.seq)
    tiles = configs.tiles_for(variant, mode, arch, gpu, dtype, dims, heads, question.seq)
    rows = [("pass", "family", "block_m", "block_n", "num_warps", "num_stages", "from")]
    for name in configs.PASSES:
        tile, reason = tiles[name], _reason(choices[name], path, arch)
        if tile.family != choices[name].tile.family:
            reason = f"default of the family {tile.family}"
        rows.append((name, tile.family, *map(str, tile), reason))
    place = f"{gpu} ({arch})" if gpu else arch
    if refusal:
        reasons = [f"not of the family hopper: {refusal}"]
    else:
        passes = (("fwd", "fwd"), ("dkdv", "bwd"))
        decisions = {name: configs.decision(part, variant, gpu, problem, dims) for name, part in passes}
        reasons = list(_family_text(tiles, decisions, path))
    lines = [f"{variant} on {place}: {problem}", "", *aligned(rows), "", *reasons]
    return [*lines, *_ladder_text(path, gpu, has_families=not refusal)]


def _family_text(tiles: Mapping[str, Any], decisions: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Why each pass has kernels of its family, and which gradients are added up in any order."""
    for name, decision in decisions.items():
        if decision.verdict is not None:
            yield _verdict_text(decision, path)
        elif tiles[name].family == "portable":
            yield f"{name} could be of the family hopper, with family='hopper', but as a rule is not faster there"
    if tiles["dq"].family == "hopper":
        yield "dq is added up in any order; deterministic=True has the portable kernel compute it"


_CONTENDERS = {"portable": "portable", "hopper_dkdv": "hopper with a portable dq", "hopper": "hopper"}


def _verdict_text(decision: Any, path: Path) -> str:
    """The measurement of the families, its times, and the choice that follows from it."""
    verdict = decision.verdict
    problem = verdict.problem
    times = [f"{_CONTENDERS[name]} {ms:.4g} ms" for name, ms in sorted(verdict.ms.items(), key=lambda each: each[1])]
    times += [f"{_CONTENDERS[name]} none ({reason})" for name, reason in verdict.failed.items()]
    why = "as measured, and not as a rule" if decision.overrules else "as a rule, which held where it was measured"
    return (
        f"{verdict.pass_name}: {_CONTENDERS[decision.kernels]}, {why}: {path.parent.name}/{path.name}: {problem.dtype} "
        f"seq {problem.seq} group {problem.group}: {', '.join(times)}, Triton {verdict.triton}"
    )


def stale(out: Path) -> list[str]:
    """A line for each tuned file that was measured, in part or whole, on other code than that of the present
    kernels."""
    if not (out / "tuned").is_dir():
        return []
    package = find_package(out).name
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    lines = []
    for path in sorted((out / "tuned").glob("*/*.json")):
        name = path.relative_to(out).as_posix()
        try:
            old = tuned.stale_parts(path.stem, tuned.read(path))
        except ValueError as error:
            lines.append(f"{name}: cannot be read: {error}")
            continue
        if old:
            lines.append(f"{name}: {', '.join(old)} measured on other kernels than these: tune again, or delete it")
    return lines


def gains(out: Path, gpu: str) -> list[str]:
    """What tuning gained on a GPU: time of the default tiles over time of the tuned tiles, geometric means by
    variant."""
    package = find_package(out).name
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    passes = importlib.import_module(f"{package}._runtime.core.configs").PASSES
    folder = out / "tuned" / (gpu or _this_gpu(tuned))
    rows = [("variant", *passes, "all", "most", "cases")]
    every: dict[str, list[float]] = {name: [] for name in passes}
    for path in sorted(folder.glob("*.json")):
        ratios: dict[str, list[float]] = {name: [] for name in passes}
        try:
            entries = tuned.read(path).entries
        except ValueError as error:
            raise CodegenError(f"{path}: cannot be read: {error}") from None
        for entry in entries:
            if entry.default_ms is not None:
                ratios[entry.pass_name].append(entry.default_ms / entry.ms)
        rows.append(_gain_row(path.stem, ratios))
        for name in passes:
            every[name] += ratios[name]
    if len(rows) == 1:
        raise CodegenError(f"{folder}: no tuned files there; `{PROGRAM} tune` on that GPU makes them")
    rows.append(_gain_row("all", every))
    heading = f"defaults' time over that of the tuned tiles on {folder.name}, geometric means over lengths and dtypes"
    return [heading, "", *aligned(rows)]


def _gain_row(name: str, ratios: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    together = [ratio for each in ratios.values() for ratio in each]
    means = [f"{geometric_mean(each):.2f}" if each else "-" for each in (*ratios.values(), together)]
    return (name, *means, f"{max(together):.2f}" if together else "-", str(len(together)))


def _this_gpu(tuned: Any) -> str:
    try:
        import torch

        found = torch.cuda.is_available()
    except ModuleNotFoundError:
        found = False
    if not found:
        raise CodegenError("--gpu: expected a GPU's name, such as h100: there is none on this machine")
    return str(tuned.gpu_key(torch.cuda.get_device_name()))


def _reason(choice: Any, path: Path, arch: str) -> str:
    entry = choice.entry
    if entry is None:
        return f"default of {arch}"
    gained = "" if entry.default_ms is None else f", default {entry.default_ms:.4g} ms"
    problem = entry.problem
    return (
        f"{path.parent.name}/{path.name}: {problem.dtype} seq {problem.seq} group {problem.group}, "
        f"{entry.ms:.4g} ms{gained}, Triton {entry.triton}"
    )


def _ladder_text(path: Path, gpu: str, *, has_families: bool) -> Iterator[str]:
    yield "ladder: a call's config=, then the nearest entry measured on this GPU, then the architecture's default"
    if has_families:
        yield "family: a call's family=, config= or deterministic=, then what was measured nearest, then the rule"
    if gpu and not path.is_file():
        yield f"{path} is not there; `{PROGRAM} tune {path.stem}` on that GPU makes it"


def _arch(out: Path, gpu: str) -> str:
    """The architecture of a GPU: from its tuned files, else from the GPU names of `codegen.arch.chips`."""
    if gpu in CHIPS:
        return gpu
    for path in sorted((out / "tuned" / gpu).glob("*.json")):
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["arch"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if gpu not in GPU_CHIPS:
        tuned = sorted(folder.name for folder in (out / "tuned").glob("*") if folder.is_dir())
        known = list(dict.fromkeys([*tuned, *GPU_CHIPS, *ARCHS]))
        hint = did_you_mean(gpu, known)
        raise CodegenError(f"--gpu: expected one of {', '.join(known)}, got '{gpu}'{hint}")
    return GPU_CHIPS[gpu]
