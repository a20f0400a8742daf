"""The kernels and tiles of a call: those that the call asks for, else those tuned on this GPU, else the defaults."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple, TypeVar

from ..archs import ARCHS, HOPPER_FAMILY, MAX_HEAD_DIM, NARROW_HEAD_DIM, SAME_TILES, VARIANT_ARCHS
from ..kernels import TRAITS
from .checks import fail
from .families import INTERPRETER as INTERPRETER
from .families import (
    LEAST_TILE,
    WHOLE_RUN,
    as_a_rule,
    backward_tiles,
    fastest,
    fits_runs,
    has_split_tile,
    has_wide_tile,
    hopper_tile,
    run_unit,
)
from .fp8 import FP8, fp8_tile
from .options import NO_OPTIONS, CallOptions, own_forward_tile
from .options import PASSES as PASSES
from .tiles import HOPPER, NO_SIZES, PORTABLE, ArchTiles, HopperTile, MaskSizes
from .tiles import Tile as Tile
from .tuned import HOPPER_DKDV, Entry, Problem, Verdict, measurements

NOT_SHORT = 2**31
LARGE_TILE = 128 * 128
"""The rows times the keys of tiles that, with more than 64 columns, need nearly all shared memory of their chip."""

Tiles = Mapping[str, Tile]
_Found = TypeVar("_Found", Entry, Verdict)


def cdiv(a: int, b: int) -> int:
    """The quotient of two positive numbers, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def whole_columns(head_dim: int) -> int:
    """Columns of an unsplit tile: a power of two, and at least the 16 that a matrix instruction takes."""
    return max(next_power_of_2(head_dim), 16)


def block_columns(head_dim: int) -> int:
    """Columns of a tile, a power of two. If they are fewer than `head_dim`, a second tile holds the rest.

    A head_dim is split into two tiles if the two have fewer columns together than one tile, or if it is wide.

    >>> [block_columns(n) for n in (8, 64, 80, 96, 112, 128, 192, 512)]
    [16, 64, 64, 64, 128, 128, 128, 256]
    """
    if NARROW_HEAD_DIM < head_dim <= MAX_HEAD_DIM:
        # Two halves share the registers that hold the offsets of their elements.
        return NARROW_HEAD_DIM
    whole = whole_columns(head_dim)
    # If rows are a multiple of 16 bytes, the second tile is copied to shared memory like the first.
    splits = whole > 32 and head_dim <= whole // 2 + whole // 4 and head_dim % 8 == 0
    return whole // 2 if splits else whole


def padded(head_dim: int) -> int:
    """The head_dim to look tiles up for: itself if it is split into two tiles, else the columns that it is padded
    to."""
    return head_dim if block_columns(head_dim) < head_dim else whole_columns(head_dim)


def arch_tiles(op: str, arch: str) -> ArchTiles:
    """The tables of an architecture's tiles: the op's own, if it has any."""
    like = SAME_TILES.get(arch, arch)
    table = VARIANT_ARCHS.get(op, ARCHS).get(like) or ARCHS.get(like)
    if table is None:
        remedy = "add it under archs: in the variants file and render again, or pass config={'fwd': {...}, ...}"
        raise NotImplementedError(f"{op}: no tiles for the architecture {arch}: {remedy}")
    return table


@cache
def default_tiles(op: str, arch: str, itemsize: int, head_dim: int, length: int = NOT_SHORT) -> Tiles:
    """The architecture's tiles for inputs of `itemsize` bytes. `head_dim` is the larger one of q's and v's, `padded`.

    `length` is a key of the architecture's `short` tiles, or NOT_SHORT.
    """
    if arch == INTERPRETER:
        return dict.fromkeys(PASSES, Tile(64, 64, 4, 1))
    table = arch_tiles(op, arch)
    passes = table.float32 if itemsize == 4 else table.half
    short = table.short.get(length, {}) if itemsize == 2 else {}
    largest_of_all = min(max(tiles) for tiles in passes.values())
    if head_dim > largest_of_all:
        expected = f"a head_dim of at most {largest_of_all} in {'float32' if itemsize == 4 else '16 bits'} on {arch}"
        fail(op, "q or v", f"{expected}, whose shared memory holds no tile of more columns", head_dim)
    served = {name: min(largest for largest in tiles if largest >= head_dim) for name, tiles in passes.items()}
    # A tile for short sequences replaces the one of the same head_dim only.
    return {name: short.get(name, {}).get(largest, passes[name][largest]) for name, largest in served.items()}


@cache
def _short_lengths(op: str, arch: str) -> tuple[int, ...]:
    return () if arch == INTERPRETER else tuple(sorted(arch_tiles(op, arch).short))


def nearest(found: Sequence[_Found], pass_name: str, problem: Problem) -> _Found | None:
    """The measurement of a pass on the problem nearest to this one, among those of its mode, columns and itemsize.

    A measurement of the same dtype is nearer than one of the other 16-bit dtype. Among equal dtypes the difference in
    length counts, in octaves, plus a quarter of the difference in group size, in octaves.
    """

    def distance(each: _Found) -> tuple[bool, float, int]:
        measured = each.problem
        octaves = abs(math.log2(measured.seq / max(problem.seq, 1)))
        groups = abs(math.log2(measured.group / problem.group))
        return measured.dtype != problem.dtype, octaves + groups / 4, measured.head_dim

    def kind(of: Problem) -> tuple[str, bool, int, int]:
        return of.mode, of.dtype == "float32", whole_columns(of.head_dim), block_columns(of.head_dim)

    fitting = [each for each in found if each.pass_name == pass_name and kind(each.problem) == kind(problem)]
    return min(fitting, key=distance, default=None)


class Choice(NamedTuple):
    """The tile of one kernel and its source: `config`, `tuned`, or `default`.

    Attributes:
        entry: if tuned, the measurement. gpu: the folder of the GPU that it was made on.
        cut: the length of the blocks that the tile was cut to, 0 if it was not cut.
    """

    tile: Tile
    source: str
    entry: Entry | None = None
    gpu: str = ""
    cut: int = 0


def ladder(
    op: str, arch: str, gpu: str, problem: Problem, options: CallOptions = NO_OPTIONS, sizes: MaskSizes = NO_SIZES
) -> dict[str, Choice]:
    """The choice for each pass: the call's config, else the nearest entry measured on this GPU, else on others of its
    architecture, else the default.

    Unless the call names a tile, it is made as small as the blocks that a tensor of the mask chooses.
    """
    choices = {name: Choice(tile, "config") for name, tile in options.tiles}
    for measured in measurements(gpu, arch, op):
        for name in PASSES:
            entry = None if name in choices else nearest(measured.entries, name, problem)
            if entry is not None:
                choices[name] = Choice(entry.tile, "tuned", entry, measured.folder)
        if len(choices) == len(PASSES):
            break
    if len(choices) < len(PASSES):
        itemsize = 4 if problem.dtype == "float32" else 2
        served = next((most for most in _short_lengths(op, arch) if problem.seq <= most), NOT_SHORT)
        defaults = default_tiles(op, arch, itemsize, padded(problem.head_dim), served)
        choices = {name: Choice(tile, "default") for name, tile in defaults.items()} | choices
    unit, columns = run_unit(op, sizes), block_columns(problem.head_dim)
    return {name: _inside_runs(op, name, choice, unit, columns) for name, choice in choices.items()}


def _inside_runs(op: str, pass_name: str, choice: Choice, unit: int, columns: int) -> Choice:
    """The choice with its tile cut to `unit`, see `fits_runs`. A default tile also gets the sides and stages that suit
    short runs, or, if it is large, the stages that fit the shared memory."""
    if choice.source == "config":
        return choice
    tile = fits_runs(pass_name, choice.tile, unit)
    if choice.source == "default" and LEAST_TILE <= unit < WHOLE_RUN:
        tile = _suits_short_runs(pass_name, tile, columns)
    elif choice.source == "default" and columns > 64 and tile.block_m * tile.block_n >= LARGE_TILE:
        tile = tile._replace(num_stages=min(tile.num_stages, TRAITS[op].large_stages or tile.num_stages))
    return choice._replace(tile=tile, cut=unit if tile[:2] != choice.tile[:2] else 0)


def _suits_short_runs(pass_name: str, tile: Tile, columns: int) -> Tile:
    """A default tile inside of short runs, with the sides and stages that were the fastest for so many columns.

    Measured with blocks of 64 on an H200. Half of the keys took 0.66 of the time forward with 256 columns, and 0.92 to
    0.97 for dq with 64; half of the rows in three stages 0.81 of that of all rows in two for dk and dv with 128. Two
    stages instead of three took 0.95 forward with 64 columns, and 0.81 for dq with 128: then two programs share a
    multiprocessor.
    """

    def half(side: int) -> int:
        return side // 2 if side > LEAST_TILE else side

    two_stages = tile._replace(num_stages=min(tile.num_stages, 2))
    if pass_name == "dkdv":
        return tile._replace(block_m=half(tile.block_m)) if columns > 64 else tile
    if pass_name == "dq":
        return two_stages if columns > 64 else tile._replace(block_n=half(tile.block_n))
    if columns > 128:
        return tile._replace(block_n=half(tile.block_n))
    return tile if columns > 64 else two_stages


class Decision(NamedTuple):
    """The kernels of a forward or backward if the call names none: one of CONTENDERS.

    `verdict`: the nearest measurement, if there is one. `overrules`: true if it contradicts the rule. `gpu`: the folder
    of the GPU that was measured.
    """

    kernels: str
    verdict: Verdict | None
    overrules: bool
    gpu: str = ""


def decision(
    pass_name: str,
    op: str,
    gpu: str,
    problem: Problem,
    head_dims: tuple[int, int],
    in_order: bool = False,
    sizes: MaskSizes = NO_SIZES,
) -> Decision:
    """The kernels of a forward (`fwd`) or a backward (`bwd`) on a chip with Hopper's family.

    If the rule was right for the nearest measurement, the rule decides, because it covers more lengths than were
    measured. Otherwise the fastest kernels of that measurement run. Kernels that gave wrong results never run.
    `in_order`: gradients are added up in a fixed order. `sizes`: as in `as_a_rule`; measured calls had those of the
    variant's examples.
    """

    def possible(kernels: str) -> str:
        return HOPPER_DKDV if in_order and pass_name == "bwd" and kernels == HOPPER else kernels

    ruled = possible(as_a_rule(pass_name, op, problem.mode, head_dims, problem.seq, sizes))
    of_gpus = (
        (each.folder, nearest(each.verdicts, pass_name, problem)) for each in measurements(gpu, HOPPER_FAMILY.arch, op)
    )
    measured_on, verdict = next((found for found in of_gpus if found[1] is not None), ("", None))
    times = {} if verdict is None else {name: ms for name, ms in verdict.ms.items() if possible(name) == name}
    if verdict is None or not times:
        return Decision(ruled, None, overrules=False)
    there = verdict.problem
    ruled_there = possible(as_a_rule(pass_name, op, there.mode, (there.head_dim, there.head_dim), there.seq))
    best = fastest(times, ruled_there)
    holds = best == ruled_there and ruled in times
    return Decision(ruled if holds else best, verdict, not holds, measured_on)


@lru_cache(maxsize=4096)
def tiles_for(
    op: str,
    mode: str,
    arch: str,
    gpu: str,
    dtype: str,
    head_dims: tuple[int, int],
    heads: tuple[int, int],
    length: int,
    options: CallOptions = NO_OPTIONS,
    sizes: MaskSizes = NO_SIZES,
) -> Tiles:
    """The tiles of each pass of a call.

    Args:
        mode: dense, packed or segmented.
        arch: the chip, such as sm_90. gpu: the folder of its tuned tiles, empty if no GPU is present.
        head_dims: of q and of v. heads: of q and of k.
        length: number of keys of a sequence, the average in a packed call.
        options: what the call asks for.
        sizes: those in the mask that the call gives.
    """
    if dtype == FP8:
        return dict.fromkeys(PASSES, fp8_tile(op, arch, head_dims, options))
    problem = Problem(mode, dtype, max(head_dims, key=padded), heads[0] // heads[1], length)
    tiles = {name: choice.tile for name, choice in ladder(op, arch, gpu, problem, options, sizes).items()}
    forward = _forward_on_hopper(op, arch, gpu, problem, head_dims, options, sizes)
    backward = _backward_on_hopper(op, arch, gpu, problem, head_dims, options, sizes)
    widths = {width for head_dim in head_dims for width in (whole_columns(head_dim), block_columns(head_dim))}
    if arch == HOPPER_FAMILY.arch and dtype != "float32" and len(widths) > 1:
        # Triton 3.6 miscompiles tiles of different widths (of k and v, or of a split head_dim) without a pipeline.
        tiles = {name: tile._replace(num_stages=max(tile.num_stages, 2)) for name, tile in tiles.items()}
    return {**tiles, **forward, **backward}


def _forward_on_hopper(
    op: str,
    arch: str,
    gpu: str,
    problem: Problem,
    head_dims: tuple[int, int],
    options: CallOptions,
    sizes: MaskSizes,
) -> dict[str, HopperTile]:
    """The tile of a forward in Hopper's family; empty if that family cannot run it or the call asks for another."""
    family, own = options.family, options.tile("fwd")
    if family == PORTABLE or (own is not None and family != HOPPER):
        return {}
    found = hopper_tile(op, problem.mode, arch, problem.dtype, head_dims, problem.seq)
    if isinstance(found, str):
        if family == HOPPER:
            fail(op, "family", "one that can run this call", f"'{HOPPER}': {found}")
        return {}
    if own is None:
        chosen = HOPPER if family == HOPPER else decision("fwd", op, gpu, problem, head_dims, False, sizes).kernels
        return {"fwd": found} if chosen == HOPPER else {}
    rows = found.block_m if has_split_tile(head_dims) else 128
    return {"fwd": own_forward_tile(op, "fwd", own, rows, f"in the family '{HOPPER}'")}


def _backward_on_hopper(
    op: str,
    arch: str,
    gpu: str,
    problem: Problem,
    head_dims: tuple[int, int],
    options: CallOptions,
    sizes: MaskSizes,
) -> dict[str, HopperTile]:
    """The tiles of a backward in Hopper's family; empty if that family cannot run it or the call asks for another.

    The kernel for all gradients adds dq in any order. If the call asks for a fixed order, or has a tile for dq, the
    portable kernel computes dq and one of Hopper's kernels the rest.
    """
    family, own = options.family, dict(options.tiles)
    if family == PORTABLE or (family != HOPPER and {"dkdv", "dq"} & own.keys()):
        return {}
    found = backward_tiles(op, problem.mode, arch, problem.dtype, head_dims, problem.seq)
    if not found:
        return {}
    in_order = options.fixed_order
    kernels = HOPPER if family == HOPPER else decision("bwd", op, gpu, problem, head_dims, in_order, sizes).kernels
    if kernels == PORTABLE:
        return {}
    # A kernel that computes dq alone adds it up in a fixed order.
    splits = has_split_tile(head_dims)
    if not splits and (in_order or kernels == HOPPER_DKDV):
        found.pop("dq", None)
    if "dkdv" in own:
        tile = found["dkdv"]
        rows = (tile.block_m,) if splits else (64,) if has_wide_tile(head_dims) else (64, 128)
        if own["dkdv"].block_m not in rows or own["dkdv"][1:3] != tile[1:3]:
            wanted = f"block_m {' or '.join(map(str, rows))}, block_n {tile.block_n} and num_warps {tile.num_warps}"
            fail(op, "config['dkdv']", f"{wanted} in the family '{HOPPER}'", str(own["dkdv"][:3]))
        found |= dict.fromkeys(["dkdv"] if splits else found, HopperTile(*own["dkdv"]))
    return {name: tile for name, tile in found.items() if name == "dkdv" or name not in own}
