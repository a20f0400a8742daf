"""The calls that lint compiles: together they run every default config of every variant once."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from codegen.analysis.call_modes import Mode
from codegen.analysis.schedule import Schedule, analyse
from codegen.arch import hopper
from codegen.arch.chips import CHIPS
from codegen.arch.paged import PagedPass
from codegen.arch.tile_rules import NARROW_HEAD_DIM, TileConfig
from codegen.plan.traits import (
    hopper_backward_tile,
    hopper_forward_tile,
    hopper_long_forward_tile,
    hopper_mixed_forward_tile,
    large_stages,
)
from codegen.plan.variant import VariantPlan, plan
from codegen.spec.model import ArchSpec, Pass, PassConfigs, Spec, Variant
from codegen.util.cover import cover

HALF_DTYPE = "bfloat16"
"""Stands for both 16-bit dtypes: their kernels differ only in the names of instructions."""

FP8 = "float8_e4m3fn"
"""The 8-bit dtype that forwards of Hopper's family take, too: `codegen.plan.hopper.fp8`."""

LARGE_TILE = 128 * 128
"""As in `_runtime/core/configs.py`: the rows times the keys of tiles that need nearly all shared memory."""

LARGEST_NARROW = 96
"""The largest head_dim whose tiles have 64 columns."""

MIXED_DIM, MIXED_VALUE_DIM = 192, 128
"""Columns of q and k, and of v, for which Hopper's forward has a tile of its own: those of DeepSeek's models."""

FAST_VARIANT = "causal"
"""The variant that `--fast` compiles with every config; if it is not selected, the first one that is."""

FAST_ARCH, FAST_DIM = "sm_90", 64
"""The chip and the head_dim for which `--fast` compiles every variant."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call: of a variant, in a mode, on a chip, with these passes compiled for their configs.

    `family`: the kernel family that the call asks for; empty if it asks for none. `length`: of the sequences, if the
    length decides which tile runs; None if the call's configs do. `value_dim`: columns of v; None if as many as of q.
    """

    variant: str
    mode: Mode
    arch: str
    dtype: str
    head_dim: int
    configs: tuple[tuple[Pass, TileConfig], ...]
    family: str = ""
    length: int | None = None
    value_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The kernels of a spec that are compiled; with `tuned` the tiles of the package's tuned files, too.

    `modes` and `passes` do not apply to calls on paged caches, which `paged` selects by their own passes.
    """

    variants: Sequence[str]
    archs: Sequence[str]
    dtypes: Sequence[str]
    passes: Sequence[Pass] = tuple(Pass)
    modes: Sequence[Mode] = tuple(Mode)
    head_dims: Sequence[int] | None = None
    fast: bool = False
    tuned: bool = False
    paged: Sequence[PagedPass] = tuple(PagedPass)


def default_dtypes(spec: Spec) -> tuple[str, ...]:
    """One 16-bit dtype, which stands for both, and float32, if the spec has them."""
    halves = [dtype for dtype in spec.defaults.dtypes if dtype != "float32"]
    half = [HALF_DTYPE] if HALF_DTYPE in halves else halves[:1]
    return (*half, *(dtype for dtype in spec.defaults.dtypes if dtype == "float32"))


def jobs(spec: Spec, selection: Selection) -> list[Job]:
    """The calls of a selection, sorted by chip. No two of them compile the same kernel for the same config."""
    found: list[Job] = []
    for arch, name, mode, dtype in product(selection.archs, selection.variants, selection.modes, selection.dtypes):
        variant = spec.variants[name]
        own = spec.tiles(name, arch)
        planned = plan(variant, mode) if arch == hopper.ARCH and dtype != "float32" else None
        for head_dim in selection.head_dims or _head_dims(spec, own, dtype):
            found += _calls(variant, mode, arch, own, dtype, head_dim, selection.passes)
            if planned is not None and hopper.FAMILY.serves_forward(head_dim):
                found += _hopper_calls(planned, dtype, head_dim, selection.passes)
        if planned is not None and MIXED_DIM in (selection.head_dims or (MIXED_DIM,)):
            found += _mixed_calls(planned, dtype, selection.passes)
    return _fast_part(found, spec, selection) if selection.fast else found


def tuned_jobs(folder: Path, selection: Selection, known: Sequence[Job]) -> list[Job]:
    """Calls with the tuned tiles of the files under `folder`: each kernel with each tile once, without `known` ones.

    The installed Triton may need more resources for a tile than the version with which the tile was measured.
    """
    seen = {(_kernel(job), entry) for job in known for entry in job.configs}
    found: list[Job] = []
    for path in sorted(folder.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for row in document["entries"]:
            job = Job(
                variant=path.stem,
                mode=Mode(row["mode"]),
                arch=document["arch"],
                dtype="float32" if row["dtype"] == "float32" else HALF_DTYPE,
                head_dim=row["head_dim"],
                configs=((Pass(row["pass"]), TileConfig(**row["config"])),),
            )
            if _is_selected(job, selection) and (key := (_kernel(job), job.configs[0])) not in seen:
                seen.add(key)
                found.append(job)
    return found


def _kernel(job: Job) -> tuple[str, Mode, str, bool, int, str]:
    return job.variant, job.mode, job.arch, job.dtype == "float32", job.head_dim, job.family


def _is_selected(job: Job, selection: Selection) -> bool:
    named = job.variant in selection.variants and job.arch in selection.archs and job.mode in selection.modes
    typed = any((dtype == "float32") == (job.dtype == "float32") for dtype in selection.dtypes)
    sized = selection.head_dims is None or job.head_dim in selection.head_dims
    return named and typed and sized and job.configs[0][0] in selection.passes


def _fast_part(found: Sequence[Job], spec: Spec, selection: Selection) -> list[Job]:
    """The jobs of `--fast`: one variant with every default tile, every variant in every mode and pass.

    A tile needs about the same resources in every variant. Code that does not compile at all depends on the variant,
    the mode or the pass, and not on the chip. Of the product of all options, the following jobs run:

    - one variant in dense calls with every distinct tile, and on every chip with each pass, dtype and head_dim. Head
      dims beyond 256, whose kernels take up to a minute each, run for one chip and dtype only;
    - every variant in each mode, and with each pass of each family of kernels, for one chip and head_dim;
    - every mode with every pass of every family, for a variant with tables of blocks and for one without.
    """
    arch = FAST_ARCH if FAST_ARCH in selection.archs else selection.archs[0]
    if selection.head_dims is None:
        wide = (arch, selection.dtypes[0])
        found = [job for job in found if job.head_dim <= NARROW_HEAD_DIM or (job.arch, job.dtype) == wide]
    single = [replace(job, configs=(entry,)) for job in found for entry in job.configs]
    one = FAST_VARIANT if FAST_VARIANT in selection.variants else selection.variants[0]
    dims = selection.head_dims or (FAST_DIM,)
    by_table = (Schedule.LISTS, Schedule.RANGES)
    with_tables = {name for name in selection.variants if analyse(spec.variants[name].mask).schedule in by_table}
    common = (arch, selection.dtypes[0], dims[0])
    features = [_features(job, selection, one, common, tables=job.variant in with_tables) for job in single]
    return [single[i] for i in cover(features, [job.variant for job in single])]


def _features(
    job: Job, selection: Selection, one: str, common: tuple[str, str, int], *, tables: bool
) -> frozenset[Hashable]:
    """The features that a job of one pass covers, as listed in `_fast_part`; none if `--fast` never runs the job."""
    pass_, tile = job.configs[0]
    kernel = (pass_, job.family)
    found: set[Hashable] = set()
    if job.variant == one and job.mode is selection.modes[0]:
        chip = (job.arch, job.dtype)
        found |= {(chip, pass_), (chip, job.head_dim), (job.arch, kernel)}
        found.add((_kind(job.arch), job.dtype, job.head_dim, kernel, tile))
    # The backward of Hopper's family takes long to compile: the backward of one variant, above, stands for all.
    if (job.arch, job.dtype, job.head_dim) == common and not (job.family and pass_ is Pass.DKDV):
        found |= {(job.variant, job.mode), (job.variant, kernel), (job.mode, kernel, tables)}
    return frozenset(found)


def _kind(arch: str) -> Hashable:
    """The properties of a chip that decide how a tile is compiled and whether it fits. Of chips with equal properties
    only one is checked."""
    chip = CHIPS[arch]
    return chip.is_nvidia, chip.shared_memory, chip.registers, chip.has_wgmma, chip.tensor_columns


def _head_dims(spec: Spec, tiles: ArchSpec, dtype: str) -> list[int]:
    """The spec's head_dims, and the largest that each table row serves, which needs the most shared memory."""
    rows = {head_dim for by_dim in _long(tiles, dtype).values() for head_dim in by_dim}
    return sorted(rows | set(spec.defaults.head_dims))


def _long(tiles: ArchSpec, dtype: str) -> PassConfigs:
    return tiles.float32 if dtype == "float32" else tiles.half


def _hopper_calls(planned: VariantPlan, dtype: str, head_dim: int, passes: Sequence[Pass]) -> list[Job]:
    """The calls in Hopper's family: forward, backward, and the forward of long sequences and of 8-bit floats."""
    tiles = {Pass.FWD: hopper_forward_tile(head_dim), Pass.DKDV: hopper_backward_tile(planned, head_dim)}
    found = _with_tiles(planned, dtype, head_dim, tiles, passes)
    if (long := hopper_long_forward_tile(planned, head_dim)) and Pass.FWD in passes:
        found.append(replace(found[0], configs=((Pass.FWD, long),), length=hopper.FAMILY.long_forward_from))
    if Pass.FWD in passes and planned.hopper_fwd_fp8 is not None and hopper.FAMILY.serves_head_dim(head_dim):
        found.append(replace(found[0], dtype=FP8))
    return found


def _mixed_calls(planned: VariantPlan, dtype: str, passes: Sequence[Pass]) -> list[Job]:
    """The calls in Hopper's family whose values have fewer columns than keys."""
    tiles = {Pass.FWD: hopper_mixed_forward_tile(planned), Pass.DKDV: hopper_backward_tile(planned, MIXED_DIM)}
    found = _with_tiles(planned, dtype, MIXED_DIM, tiles, passes)
    return [replace(job, value_dim=MIXED_VALUE_DIM) for job in found]


def _with_tiles(
    planned: VariantPlan, dtype: str, head_dim: int, tiles: Mapping[Pass, TileConfig | None], passes: Sequence[Pass]
) -> list[Job]:
    """A call in Hopper's family for each of the passes that has a tile."""
    return [
        Job(
            variant=planned.written.name,
            mode=planned.mode,
            arch=hopper.ARCH,
            dtype=dtype,
            head_dim=head_dim,
            configs=((each, tile),),
            family=hopper.NAME,
        )
        for each, tile in tiles.items()
        if each in passes and tile is not None
    ]


def _calls(
    variant: Variant, mode: Mode, arch: str, tiles: ArchSpec, dtype: str, head_dim: int, passes: Sequence[Pass]
) -> Iterator[Job]:
    """One call with the configs of long sequences, and one per short length with the configs that it adds."""
    long = _long(tiles, dtype)
    # A chip may have no config for wide head_dims in one dtype. Calls refuse such head_dims.
    if head_dim > min(max(by_dim) for by_dim in long.values()):
        return
    served = {p: min(largest for largest in long[p] if largest >= head_dim) for p in passes}
    most_stages = large_stages(variant) if head_dim > LARGEST_NARROW else None
    seen: set[tuple[Pass, TileConfig]] = set()
    short: list[PassConfigs] = [] if dtype == "float32" else list(tiles.short.values())
    for rows in (long, *short):
        configs = {
            (p, _with_room(by_dim[served[p]], most_stages))
            for p, by_dim in rows.items()
            if p in served and served[p] in by_dim
        }
        new = tuple(sorted(configs - seen, key=lambda entry: entry[0]))
        seen |= configs
        if new:
            yield Job(variant=variant.name, mode=mode, arch=arch, dtype=dtype, head_dim=head_dim, configs=new)


def _with_room(tile: TileConfig, most_stages: int | None) -> TileConfig:
    """The tile that a call runs: a large one may have fewer stages, as in `_runtime/core/configs.py: ladder`."""
    if most_stages is None or tile.block_m * tile.block_n < LARGE_TILE:
        return tile
    return replace(tile, num_stages=min(tile.num_stages, most_stages))
