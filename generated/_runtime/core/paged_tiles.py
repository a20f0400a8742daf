# SPDX-License-Identifier: Apache-2.0
"""The tiles of a call on paged caches: those that it asks for, else those tuned on this GPU, else the defaults.

The bits of a sequence's results follow from its tile and from where its keys are split. So nothing here reads the
batch, the size of a page, the table's capacity or a length: a sequence has the same tile in any batch, on any pages.
One tile serves all lengths, the best on average. The host could choose a tile for each range of lengths only by the
table's capacity, which is all that it knows of lengths, and then a larger table would change results. The device could
choose it only at the cost of a launch for each range in every layer. The number of splits does follow from a sequence's
own length: the device computes it.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

from ..archs import HOPPER_FAMILY, NARROW_HEAD_DIM
from ..kernels import TRAITS
from .checks import fail, shown
from .configs import arch_tiles, block_columns, padded, whole_columns
from .families import INTERPRETER
from .options import PAGED_PASSES, Asked, checked_paged_tile
from .tiles import PagedTile
from .tuned import PagedEntry, PagedProblem, measurements

DECODE, PROMPTS = PAGED_PASSES

PagedConfig = tuple[tuple[str, Asked], ...]
"""The tiles that a call asks for, by pass."""


class PagedTiles(NamedTuple):
    """The tiles of a call: of sequences with few rows, and of prompts. `decode.block_m` is a least value."""

    decode: PagedTile
    prompts: PagedTile


class PagedChoice(NamedTuple):
    """The tile of one kernel and its source: `config`, `tuned`, or `default`. If tuned, with the measurement, and the
    folder of the GPU that it was made on."""

    tile: PagedTile
    source: str
    entry: PagedEntry | None = None
    gpu: str = ""


def checked_paged_config(op: str, config: Any) -> PagedConfig:
    """Check the argument `config` of a call on paged caches.

    Beside `decode` and `paged_fwd` it may name the passes of other calls, as a config for a whole model does. The tile
    of `fwd` then serves prompts, unless `paged_fwd` is named.
    """
    if config is None:
        return ()
    if not isinstance(config, dict):
        fail(op, "config", "None or a dict of pass name -> tile", shown(config))
    found = {name: checked_paged_tile(op, name, entry) for name, entry in config.items()}
    if "fwd" in found:
        found.setdefault(PROMPTS, found["fwd"])
    return tuple([(name, found[name]) for name in PAGED_PASSES if name in found])


def default_paged_tile(op: str, arch: str, name: str, problem: PagedProblem) -> PagedTile:
    """The architecture's tile of a kernel."""
    if arch == INTERPRETER:
        return PagedTile(16 if name == DECODE else 64, 64, 4, 1, 128)
    table = arch_tiles(op, arch)
    tiles = (table.paged_float32 if problem.dtype == "float32" else table.paged_half)[name]
    head_dim = padded(problem.head_dim)
    return tiles[min((most for most in tiles if most >= head_dim), default=max(tiles))]


def nearest_paged(found: tuple[PagedEntry, ...], name: str, problem: PagedProblem) -> PagedEntry | None:
    """The measurement of a pass nearest to a call's, among those of its columns and element sizes: of the same dtypes
    before others, then of the nearest group, in octaves."""

    def kind(of: PagedProblem) -> tuple[bool, bool, int, int]:
        is_small = of.kv_dtype.startswith("float8")
        return of.dtype == "float32", is_small, whole_columns(of.head_dim), block_columns(of.head_dim)

    def distance(each: PagedEntry) -> tuple[bool, float, int]:
        measured = each.problem
        differs = (measured.dtype, measured.kv_dtype) != (problem.dtype, problem.kv_dtype)
        return differs, abs(math.log2(measured.group / problem.group)), measured.head_dim

    fitting = [each for each in found if each.pass_name == name and kind(each.problem) == kind(problem)]
    return min(fitting, key=distance, default=None)


def paged_ladder(
    op: str, arch: str, gpu: str, problem: PagedProblem, config: PagedConfig = ()
) -> dict[str, PagedChoice]:
    """The choice for each pass: the call's config, else the nearest entry measured on this GPU, else on others of its
    architecture, else the default.

    Prompts of latent attention have the default tile where Hopper's family has a kernel for them: its tile is fixed,
    and a plan does not know yet which kernel its calls run.
    """
    asked = dict(config)
    halves = problem.head_dim > NARROW_HEAD_DIM and problem.dtype == problem.kv_dtype != "float32"
    has_latents = halves and arch == HOPPER_FAMILY.arch and TRAITS[op].hopper_reads_latents
    choices: dict[str, PagedChoice] = {}
    for name in PAGED_PASSES:
        choice = PagedChoice(default_paged_tile(op, arch, name, problem), "default")
        for measured in () if name == PROMPTS and has_latents else measurements(gpu, arch, op):
            entry = nearest_paged(measured.paged, name, problem)
            if entry is not None:
                choice = PagedChoice(entry.tile, "tuned", entry, measured.folder)
                break
        if name in asked:
            own = asked[name]
            keys = choice.tile.keys_per_split if own.keys_per_split is None else own.keys_per_split
            choice = PagedChoice(PagedTile(*own.tile, keys), "config")
        choices[name] = choice
    return choices


@lru_cache(maxsize=1024)
def paged_tiles(
    op: str,
    arch: str,
    gpu: str,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    group: int,
    config: PagedConfig = (),
) -> PagedTiles:
    """The tiles of a call on paged caches.

    Args:
        arch: the chip, such as sm_90. gpu: the folder of its tuned tiles, empty if no GPU is present.
        dtype: of q. kv_dtype: of the caches.
        head_dim: of q, because a plan of a step does not know that of v.
        group: query heads per key head.
        config: what the call asks for, from `checked_paged_config`.
    """
    choices = paged_ladder(op, arch, gpu, PagedProblem(dtype, kv_dtype, head_dim, group), config)
    return PagedTiles(*(choices[name].tile for name in PAGED_PASSES))
