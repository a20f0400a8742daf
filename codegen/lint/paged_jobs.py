"""The calls on paged caches that lint compiles, and whether their kernels read keys and values ahead.

If a page holds whole blocks of keys, a kernel reads one page number for each block; otherwise it reads one for each
key. These are two kernels.
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
from codegen.plan.kernel_files import LATENT
from codegen.plan.paged.hopper import has_hopper_forward
from codegen.plan.paged.kernels import is_legal
from codegen.plan.paged.latent import has_latent_kernel
from codegen.plan.traits import hopper_forward_tile
from codegen.spec.model import Spec
from codegen.util.cover import cover

WHOLE_PAGE = max(BLOCK_SIZES)
"""Size of a page that holds whole blocks, whatever their size."""

FEW_QUERIES = 24
"""Queries of a sequence for which a decoding tile has its most rows, 64, as lint's calls have two heads per group."""

HOPPER_PAGES = (WHOLE_PAGE, 64, 16)
"""Page sizes for which Hopper's family copies pieces of different sizes: a block, half a block, and the least piece."""


LATENT_DIM, VALUE_DIM, LATENT_CACHES = 576, 512, ((64, False), (16, False), (64, True))
"""Columns of keys and of values of latent attention, and its caches: pages that hold a block of keys or a piece of it,
and whether they have 8 bits."""


@dataclass(frozen=True, kw_only=True)
class PagedJob:
    """One call on paged caches: with few queries or prompts, with a tile, on pages of one size.

    `queries`: number of queries of each sequence; None for one query in decoding and many in prompts. `family`: the
    kernel family that the call asks for; empty if it asks for none. `value_dim`: the first columns of keys that are the
    values, as in latent attention; None if values are stored apart. `small`: the cache has 8 bits, and each of its
    tokens scales of its own.
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
    value_dim: int | None = None
    small: bool = False

    @property
    def ending(self) -> str:
        """The ending of the kernel's name, which is the same for both passes."""
        if self.value_dim is not None:
            return f"_paged_{LATENT}"
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
    found += _hopper_jobs(spec, selection) + _latent_jobs(spec, selection)
    if selection.fast:
        found = _fast_part(found, selection)
    return found + [job for job in _tuned(tuned, selection) if job not in found] if selection.tuned else found


def page_sizes(tile: PagedTileConfig) -> tuple[int, int]:
    """A page size that holds whole blocks of a tile, and one that does not."""
    return WHOLE_PAGE, tile.block_n // 2


def _has_few_queries(job: PagedJob) -> bool:
    """Whether calls with a few queries run another kernel than both passes: a decoding tile has more rows then, and
    kernels that look up a page for each key are compiled with limited registers."""
    return job.pass_ is PagedPass.DECODE and job.page_size != WHOLE_PAGE and job.head_dim == NARROW_HEAD_DIM


def single_jobs(job: Job | PagedJob) -> list[Job | PagedJob]:
    """The parts of a job that can be compiled separately."""
    return [job] if isinstance(job, PagedJob) else [replace(job, configs=(entry,)) for entry in job.configs]


def _default_tiles(
    spec: Spec, selection: Selection, arch: str, name: str, dtype: str, pass_: PagedPass
) -> list[tuple[int, PagedTileConfig]]:
    tiles = spec.tiles(name, arch).paged_tiles(pass_, 4 if dtype == "float32" else 2)
    served = {most for most in tiles if most <= NARROW_HEAD_DIM} | set(spec.defaults.head_dims)
    wanted = selection.head_dims or sorted(served)
    return [(head_dim, tiles[min(most for most in tiles if most >= head_dim)]) for head_dim in wanted]


def _hopper_jobs(spec: Spec, selection: Selection) -> list[PagedJob]:
    """Calls with prompts in Hopper's family, for the variants that have its kernel on pages."""
    if hopper.ARCH not in selection.archs or PagedPass.PAGED_FWD not in selection.paged:
        return []
    family = hopper.FAMILY
    wanted = selection.head_dims or sorted({*family.forward_tiles, family.most_columns, *spec.defaults.head_dims})
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
        if dtype != "float32" and family.serves_forward(head_dim) and has_hopper_forward(spec.variants[name])
    ]


def _latent_jobs(spec: Spec, selection: Selection) -> list[PagedJob]:
    """Calls of latent attention, for the variants that have its kernel."""
    if hopper.ARCH not in selection.archs or PagedPass.PAGED_FWD not in selection.paged or selection.head_dims:
        return []
    tiles = spec.archs[hopper.ARCH].paged_tiles(PagedPass.PAGED_FWD, 2)
    return [
        PagedJob(
            variant=name,
            arch=hopper.ARCH,
            dtype=dtype,
            head_dim=LATENT_DIM,
            pass_=PagedPass.PAGED_FWD,
            tile=tiles[max(tiles)],
            page_size=page_size,
            value_dim=VALUE_DIM,
            small=small,
        )
        for name, dtype, (page_size, small) in product(selection.variants, selection.dtypes, LATENT_CACHES)
        if dtype != "float32" and has_latent_kernel(spec.variants[name])
    ]


def _fast_part(found: Sequence[PagedJob], selection: Selection) -> list[PagedJob]:
    """Every head_dim, pass and kind of page of one variant for each chip; every pass and kind of page of every variant
    for one chip.

    A tile needs about the same resources in every variant.
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
            of |= {(job.value_dim, job.page_size)} if job.value_dim is not None else set()
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
    """Signs that the compiler does not read keys and values ahead, although the tile has several stages.

    Each stage copies a block of keys and of values: the code has one copy before a loop for each stage but one, and one
    in the loop's body. Shared memory holds one block fewer than there are stages, because the last block is used while
    the next one is copied. Kernels of Hopper's family are not checked: they copy explicitly.
    """
    if job.family or job.value_dim is not None:
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
