"""The tiles that a call runs with on a GPU, and why. The generated package decides; no GPU is needed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import PACKAGE, PROGRAM
from codegen.analysis.call_modes import Mode
from codegen.analysis.schedule import Schedule, analyse
from codegen.arch.chips import CHIPS, DEFAULT_MULTIPROCESSORS, GPU_CHIPS
from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM
from codegen.compile.packages import find_package, manifest_of
from codegen.inspect.decode import split, splitting, text_of
from codegen.inspect.tuned_files import this_gpu
from codegen.plan.paged.kernels import paged_plan
from codegen.spec.model import DTYPE_NAMES, DTYPES, Variant
from codegen.util.choices import checked_names
from codegen.util.errors import CodegenError, did_you_mean
from codegen.util.text import aligned

DEFAULT_KV_HEADS = 8
"""Key heads of the call on paged caches that is explained, if the question names no number."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A call to explain. `gpu`: a folder of tuned tiles, such as h100, or an architecture."""

    variant: str
    gpu: str
    dtype: str = "bf16"
    head_dim: int = 128
    seq: int = 4096
    group: int = 1
    mode: str = "dense"
    kv_heads: int = DEFAULT_KV_HEADS


def answer(out: Path, question: Question, spec_variant: Variant | None = None) -> list[str]:
    """The lines that answer a question about the package in `out`.

    `spec_variant`: the variant in the package's spec; None leaves out which keys a decoding sequence reads.
    """
    package = find_package(out).name
    configs = importlib.import_module(f"{package}._runtime.core.configs")
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    hashes = importlib.import_module(f"{package}._runtime.kernels").KERNEL_HASHES
    (variant,) = checked_names("variant", [question.variant], hashes)
    (dtype,) = checked_names("--dtype", [DTYPE_NAMES.get(question.dtype, question.dtype)], DTYPES)
    (mode,) = checked_names("--mode", [question.mode], [str(each) for each in Mode])
    if not MIN_HEAD_DIM <= question.head_dim <= MAX_HEAD_DIM:
        raise CodegenError(f"--head-dim: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {question.head_dim}")
    named = question.gpu or this_gpu(tuned)
    arch = arch_of_gpu(out, named)
    gpu = "" if named == arch else named
    problem = tuned.Problem(mode, dtype, question.head_dim, question.group, question.seq)
    choices = configs.ladder(variant, arch, gpu, problem)
    path = tuned.tuned_path(gpu, variant, out)
    families = importlib.import_module(f"{package}._runtime.core.families")
    dims, heads = (question.head_dim, question.head_dim), (question.group, 1)
    forward = families.hopper_tile(variant, mode, arch, dtype, dims, question.seq)
    refusal = forward if isinstance(forward, str) else ""
    backward_refusal = families.backward_refusal(variant, arch, dtype, dims, question.seq)
    tiles = configs.tiles_for(variant, mode, arch, gpu, dtype, dims, heads, question.seq)
    rows = [("pass", "family", "block_m", "block_n", "num_warps", "num_stages", "from")]
    for name in configs.PASSES:
        tile, reason = tiles[name], _reason(choices[name], path, arch)
        if choices[name].cut:
            reason += f", cut to runs of {choices[name].cut}"
        if tile.family != choices[name].tile.family:
            reason = f"default of the family {tile.family}"
        rows.append((name, tile.family, *map(str, tile), reason))
    place = f"{gpu} ({arch})" if gpu else arch
    if refusal:
        reasons = [f"not of the family hopper: {refusal}"]
    else:
        passes = (("fwd", "fwd"), ("dkdv", "bwd"))
        decisions = {name: configs.decision(part, variant, gpu, problem, dims) for name, part in passes}
        reasons = list(_family_text(tiles, decisions, path, backward_refusal))
    lines = [f"{variant} on {place}: {problem}", "", *aligned(rows), "", *reasons]
    lines += _ladder_text(path, gpu, has_families=not refusal)
    if tuned.PAGED not in hashes[variant]:
        return lines
    choices = importlib.import_module(f"{package}._runtime.core.paged_tiles").paged_ladder(
        variant, arch, gpu, tuned.PagedProblem(dtype, dtype, question.head_dim, question.group)
    )
    lines += ["", *_paged_text(choices, question, path, arch, spec_variant)]
    prompts = importlib.import_module(f"{package}._runtime.core.prompts")
    if prompts.suits_hopper(variant, arch, dtype, dims):
        pages = f"pages of {prompts.LEAST_PAGE} keys and more, a multiple of {prompts.PAGE_FACTOR}"
        part, whole = prompts.least_part(dims)
        lines.append(f"prompts whose blocks fill {part}/{whole} of the GPU or more run the family hopper on {pages}")
    return lines


PAGED_FIELDS = ("block_m", "block_n", "num_warps", "num_stages", "keys_per_split")

DECODE_LENGTHS = (1024, 8192, 32_768, 131_072)
"""Lengths for which the parts of a sequence are listed."""


def _paged_text(
    choices: Mapping[str, Any], question: Question, path: Path, arch: str, variant: Variant | None
) -> Iterator[str]:
    """The tiles of calls on paged caches, and into how many parts a decoding sequence is split."""
    heads = f"group {question.group}, {question.kv_heads} key heads, {DEFAULT_MULTIPROCESSORS} multiprocessors"
    yield f"on paged caches, with any batch size and page size: {heads}"
    yield ""
    tiles = [
        (name, *(str(getattr(choice.tile, field)) for field in PAGED_FIELDS), _paged_reason(choice, path, arch))
        for name, choice in choices.items()
    ]
    yield from aligned([("pass", *PAGED_FIELDS, "from"), *tiles])
    if variant is None:
        yield ""
        yield "which keys are read: not known without the spec of this package, which --variants FILE names"
        return
    decode, prompts = (PagedTileConfig(**choices[each].tile._asdict()) for each in PagedPass)
    how = splitting(decode, prompts, q_len=1, group=question.group, kv_heads=question.kv_heads)
    steps = {length: split(variant, how, q_len=1, kv_len=length)[0] for length in DECODE_LENGTHS}
    rows = [
        (str(length), text_of(found.read), str(len(found.parts)), str(max(part.keys for part in found.parts)))
        for length, found in steps.items()
    ]
    yield ""
    yield from aligned([("keys", "read by the last query", "splits", "keys of each"), *rows])
    yield ""
    yield f"tiles of {how.block_m} rows; in a large batch a program may take several splits; results stay bitwise equal"
    yield _reads_text(variant, steps[DECODE_LENGTHS[-1]].read, DECODE_LENGTHS[-1])


def _reads_text(variant: Variant, read: Sequence[range], kv_len: int) -> str:
    """A line on whether a decoding step reads the pages of all keys; `read`: the keys it reads, of `kv_len`."""
    if list(read) != [range(kv_len)]:
        return "other keys and their page numbers are never read: their pages may be freed"
    planned = paged_plan(variant)
    if planned is not None and planned.scans_mask:
        return "a split reads only from the block of its first visible key to its last visible key"
    if analyse(variant.mask).schedule in (Schedule.RANGES, Schedule.LISTS):
        return "every key is read, then masked: the mask does not depend on positions alone"
    return "every key is read"


def _paged_reason(choice: Any, path: Path, arch: str) -> str:
    entry = choice.entry
    if entry is None:
        return f"default of {arch}"
    gained = "" if entry.default_ms is None else f", default {entry.default_ms:.4g} ms"
    problem = entry.problem
    where = f"{choice.gpu}/{path.name}: {problem.dtype} group {problem.group}"
    return f"{where}, {entry.ms:.4g} ms on average{gained}, Triton {entry.triton}"


def _family_text(
    tiles: Mapping[str, Any], decisions: Mapping[str, Any], path: Path, backward_refusal: str
) -> Iterator[str]:
    """Why each pass runs kernels of its family, and which gradients are summed in no fixed order."""
    for name, decision in decisions.items():
        if name != "fwd" and backward_refusal:
            yield f"{name} and dq not of the family hopper: {backward_refusal}"
        elif decision.verdict is not None:
            yield _verdict_text(decision, path)
        elif tiles[name].family == "portable":
            yield f"{name} could run the family hopper, with family='hopper'; the default rule expects no gain from it"
    if tiles["dq"].family == "hopper" and tiles["dq"] == tiles["dkdv"]:
        yield "dq is summed in no fixed order; deterministic=True computes it with the portable kernel"


_CONTENDERS = {"portable": "portable", "hopper_dkdv": "hopper with a portable dq", "hopper": "hopper"}


def _verdict_text(decision: Any, path: Path) -> str:
    """The measurement of the families, its times, and the choice that follows from it."""
    verdict = decision.verdict
    problem = verdict.problem
    times = [f"{_CONTENDERS[name]} {ms:.4g} ms" for name, ms in sorted(verdict.ms.items(), key=lambda each: each[1])]
    times += [f"{_CONTENDERS[name]} none ({reason})" for name, reason in verdict.failed.items()]
    why = (
        "by measurement, against the default rule"
        if decision.overrules
        else "by the default rule, which the measurement confirms"
    )
    return (
        f"{verdict.pass_name}: {_CONTENDERS[decision.kernels]}, {why}: {decision.gpu}/{path.name}: {problem.dtype} "
        f"seq {problem.seq} group {problem.group}: {', '.join(times)}, Triton {verdict.triton}"
    )


def _reason(choice: Any, path: Path, arch: str) -> str:
    entry = choice.entry
    if entry is None:
        return f"default of {arch}"
    gained = "" if entry.default_ms is None else f", default {entry.default_ms:.4g} ms"
    problem = entry.problem
    return (
        f"{choice.gpu}/{path.name}: {problem.dtype} seq {problem.seq} group {problem.group}, "
        f"{entry.ms:.4g} ms{gained}, Triton {entry.triton}"
    )


def _ladder_text(path: Path, gpu: str, *, has_families: bool) -> Iterator[str]:
    nearest = "the nearest measurement on this GPU, else on another of its architecture"
    yield f"tiles: a call's config=, else {nearest}, else the architecture's default"
    if has_families:
        yield "family: a call's family=, config= or deterministic=, else such a measurement, else the default rule"
    if gpu and not path.is_file():
        package = path.parents[2]
        of_package = "" if package.name == PACKAGE else f" --variants {_spec_of(package)} --out {package}"
        yield f"{path} is not there; `{PROGRAM} tune {path.stem}{of_package}` on that GPU makes it"


def _spec_of(package: Path) -> str:
    """The spec that a package was rendered from. Tuned files may lie alone: then nothing names it."""
    manifest = manifest_of(package) if (package / "MANIFEST.json").is_file() else {}
    return str(manifest.get("source") or "SPEC")


def arch_of_gpu(out: Path, gpu: str) -> str:
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
        known = list(dict.fromkeys([*tuned, *GPU_CHIPS, *CHIPS]))
        hint = did_you_mean(gpu, known)
        raise CodegenError(f"--gpu: expected one of {', '.join(known)}, got '{gpu}'{hint}")
    return GPU_CHIPS[gpu]
