"""The calls on paged caches that lint compiles, and whether their kernels read ahead.

A page that holds whole blocks of keys gives one page number for a block, any other page one for each key: two kernels.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from codegen.arch import hopper
from codegen.arch.chips import CHIPS
from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.arch.tile_rules import BLOCK_SIZES, NARROW_HEAD_DIM
from codegen.lint.jobs import FAST_ARCH, FAST_DIM, FAST_VARIANT, Job, Selection
from codegen.lint.kernels import Usage
from codegen.plan.paged import is_legal
from codegen.plan.paged_hopper import has_hopper_forward
from codegen.plan.traits import hopper_forward_tile
from codegen.spec.model import Spec
from codegen.util.cover import cover

WHOLE_PAGE = max(BLOCK_SIZES)
"""A page that holds whole blocks of any size."""

FEW_QUERIES = 24
"""Queries of a sequence that make the most rows of a tile of few queries, 64, in lint's groups of two heads."""

HOPPER_PAGES = (WHOLE_PAGE, 64, 16)
"""Pages that Hopper's family copies in pieces of other sizes: of a block, of half of one, and of the least."""


@dataclass(frozen=True, kw_only=True)
class PagedJob:
    """One call on paged caches: of few queries or of prompts, with a tile, on pages of a size.

    `queries`: of each sequence, None for one in decoding and many in prompts. `family`: of the kernels, where the call
    asks for one.
    """

    variant: str
    arch: str
    dtype: str
    head_dim: int
    pass_: PagedPass
    tile: PagedTileConfig
    page_size: int
    queries: int | None = None
    family: str = ""

    @property
    def ending(self) -> str:
        """How the name of its kernel ends: of both passes the same."""
        return f"_paged_{self.family}_fwd" if self.family else "_paged_fwd"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2


def paged_jobs(spec: Spec, selection: Selection, tuned: Path) -> list[PagedJob]:
    """The calls of a selection: every default tile, and with `tuned` those of the tuned files in that folder."""
    found = [
        PagedJob(variant=name, arch=arch, dtype=dtype, head_dim=head_dim, pass_=pass_, tile=tile, page_size=page_size)
        for arch, name, dtype, pass_ in product(selection.archs, selection.variants, selection.dtypes, selection.paged)
        if is_legal(spec.variants[name])
        for head_dim, tile in _default_tiles(spec, selection, arch, name, dtype, pass_)
        for page_size in page_sizes(tile)
    ]
    found += [replace(job, queries=FEW_QUERIES) for job in found if _has_few_queries(job)]
    found += _hopper_jobs(spec, selection)
    if selection.fast:
        found = _fast_part(found, selection)
    return found + [job for job in _tuned(tuned, selection) if job not in found] if selection.tuned else found


def page_sizes(tile: PagedTileConfig) -> tuple[int, int]:
    """Of pages that hold whole blocks, and of such that do not."""
    return WHOLE_PAGE, tile.block_n // 2


def _has_few_queries(job: PagedJob) -> bool:
    """Whether calls with a few queries of a decoding tile run another kernel than both passes: such a tile has more
    rows, and registers are limited where each key has a page of its own to look up."""
    return job.pass_ is PagedPass.DECODE and job.page_size != WHOLE_PAGE and job.head_dim == NARROW_HEAD_DIM


def single_jobs(job: Job | PagedJob) -> list[Job | PagedJob]:
    """The parts of a job that can be compiled apart."""
    return [job] if isinstance(job, PagedJob) else [replace(job, configs=(entry,)) for entry in job.configs]


def _default_tiles(
    spec: Spec, selection: Selection, arch: str, name: str, dtype: str, pass_: PagedPass
) -> list[tuple[int, PagedTileConfig]]:
    own = spec.variants[name].archs.get(arch) or spec.archs[arch]
    tiles = own.paged_tiles(pass_, 4 if dtype == "float32" else 2)
    served = {most for most in tiles if most <= NARROW_HEAD_DIM} | set(spec.defaults.head_dims)
    wanted = selection.head_dims or sorted(served)
    return [(head_dim, tiles[min(most for most in tiles if most >= head_dim)]) for head_dim in wanted]


def _hopper_jobs(spec: Spec, selection: Selection) -> list[PagedJob]:
    """Prompts in Hopper's family, of the variants that have it on pages."""
    if hopper.ARCH not in selection.archs or PagedPass.PAGED_FWD not in selection.paged:
        return []
    family = hopper.FAMILY
    wanted = selection.head_dims or sorted({*family.forward_tiles, *spec.defaults.head_dims})
    return [
        PagedJob(
            variant=name,
            arch=hopper.ARCH,
            dtype=dtype,
            head_dim=head_dim,
            pass_=PagedPass.PAGED_FWD,
            tile=PagedTileConfig(**asdict(hopper_forward_tile(head_dim))),
            page_size=page_size,
            family=hopper.NAME,
        )
        for name, dtype, head_dim, page_size in product(selection.variants, selection.dtypes, wanted, HOPPER_PAGES)
        if dtype != "float32" and family.serves_head_dim(head_dim) and has_hopper_forward(spec.variants[name])
    ]


def _fast_part(found: Sequence[PagedJob], selection: Selection) -> list[PagedJob]:
    """Every head_dim, pass and kind of page of one variant for each chip; every variant with both for one chip.

    What a tile takes of a chip it takes in any variant.
    """
    one = FAST_VARIANT if FAST_VARIANT in selection.variants else selection.variants[0]
    arch = FAST_ARCH if FAST_ARCH in selection.archs else selection.archs[0]
    head_dim = (selection.head_dims or (FAST_DIM,))[0]
    common = (arch, selection.dtypes[0], head_dim)

    def features(job: PagedJob) -> frozenset[Hashable]:
        of: set[Hashable] = set()
        whole = job.page_size == WHOLE_PAGE
        if job.variant == one:
            chip = CHIPS[job.arch]
            kind = (chip.is_nvidia, chip.shared_memory, chip.has_wgmma, chip.tensor_columns)
            of |= {(kind, job.dtype, job.head_dim), (kind, job.dtype, job.pass_), (job.arch, whole)}
            of |= {(job.family, job.head_dim), (job.family, job.page_size)} if job.family else set()
        if (job.arch, job.dtype, job.head_dim) == common:
            of |= {(job.variant, job.family)} if job.family else {(job.variant, job.pass_), (job.variant, whole)}
        return frozenset(of)

    return [found[i] for i in cover([features(job) for job in found], [job.variant for job in found])]


def _tuned(folder: Path, selection: Selection) -> list[PagedJob]:
    found: dict[PagedJob, None] = {}
    for path in sorted(folder.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for row in document.get("paged", ()):
            tile = PagedTileConfig(**row["config"])
            for page_size in page_sizes(tile):
                job = PagedJob(
                    variant=path.stem,
                    arch=document["arch"],
                    dtype=row["dtype"],
                    head_dim=row["head_dim"],
                    pass_=PagedPass(row["pass"]),
                    tile=tile,
                    page_size=page_size,
                )
                if job.variant in selection.variants and job.arch in selection.archs and job.pass_ in selection.paged:
                    found[job] = None
    return list(found)


def pipeline_warnings(used: Usage, job: PagedJob, loops: int = 1) -> list[str]:
    """Signs that the compiler does not read keys and values ahead, as the stages of the tile ask for.

    Each stage copies a block of both: those before a loop once, that of a loop in its body. Shared memory holds one
    block fewer than there are stages, as the last is used while the next is on its way. A kernel of Hopper's family
    says itself what it copies.
    """
    if job.family:
        return []
    block = 2 * job.tile.block_n * job.head_dim * job.itemsize
    stages = job.tile.num_stages
    if stages < 2:
        return []
    found = []
    ahead = loops * stages * block
    if CHIPS[job.arch].is_nvidia and used.copied < ahead:
        of_loops = f"{stages} stages" if loops == 1 else f"{stages} stages of {loops} loops"
        found.append(f"copies {used.copied} bytes ahead, {of_loops} are {ahead}")
    if used.shared < (stages - 1) * block:
        found.append(f"{used.shared} bytes of shared memory, the blocks of {stages} stages take {(stages - 1) * block}")
    return found
