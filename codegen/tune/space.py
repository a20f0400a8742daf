"""The tiles worth compiling for a kernel, best guess first.

The space is the range of an architecture's tiles in the spec, one step wider on each side. A model of shared memory and
registers removes tiles that cannot run, and a model of time orders the rest, so that a small budget already includes a
good tile. The models only propose: every tile is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from codegen.arch.chips import CHIPS, Chip
from codegen.arch.tile_rules import NARROW_HEAD_DIM, TILE_FIELDS, TileConfig
from codegen.spec.model import ArchSpec, Pass, PassConfigs

_OTHER_REGISTERS = 24
"""Addresses, bounds and row vectors, beside the tiles that `registers` counts. Compiled kernels have 20 to 80 more."""

_MOST_WARPS = 64


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernel to find tiles for: a pass at one head_dim, for inputs of `itemsize` bytes, on a chip."""

    pass_: Pass
    arch: str
    itemsize: int
    head_dim: int

    @property
    def chip(self) -> Chip:
        """The chip of that architecture."""
        return CHIPS[self.arch]

    @property
    def is_wide(self) -> bool:
        """True for head_dims whose tiles have two parts of up to 256 columns."""
        return self.head_dim > NARROW_HEAD_DIM

    @property
    def columns(self) -> int:
        """Columns of a tile: head_dim padded to one power of two, or to the sum of two if less or if it is wide."""
        if self.is_wide:
            return NARROW_HEAD_DIM + max(16, 1 << (self.head_dim - NARROW_HEAD_DIM - 1).bit_length())
        whole = 1 << (self.head_dim - 1).bit_length()
        rest = max(16, 1 << max(self.head_dim - whole // 2 - 1, 0).bit_length())
        return min(whole, whole // 2 + rest) if self.head_dim % 8 == 0 else whole


def shared_bytes(kernel: Kernel, tile: TileConfig) -> int:
    """Shared memory of one program: its resident tiles, and the tiles of each pipeline stage.

    Exact for what Triton 3.6 makes of these kernels on sm_90; an upper bound where operands go to registers at once.
    """
    row = kernel.columns * kernel.itemsize
    own, streamed = (tile.block_n, tile.block_m) if kernel.pass_ is Pass.DKDV else (tile.block_m, tile.block_n)
    kept = own * row * (1 if kernel.pass_ is Pass.FWD else 2)  # q; q and do; k and v
    vectors = 8 * streamed if kernel.pass_ is Pass.DKDV else 0  # lse and delta
    return kept + tile.num_stages * 2 * streamed * row + vectors


def registers(kernel: Kernel, tile: TileConfig) -> int:
    """32-bit registers per thread: those of the accumulators, the score tile and the tiles computed from it."""
    scores = tile.block_m * tile.block_n
    halves = scores * kernel.itemsize // 4
    accumulated = {
        Pass.FWD: tile.block_m * kernel.columns + scores + halves,
        Pass.DQ: tile.block_m * kernel.columns + 2 * scores + halves,
        Pass.DKDV: 2 * tile.block_n * kernel.columns + 2 * scores + halves,
    }
    return accumulated[kernel.pass_] // (kernel.chip.lanes * tile.num_warps) + _OTHER_REGISTERS


def fits(kernel: Kernel, tile: TileConfig) -> bool:
    """True if a tile can be launched and, by the model, does not spill."""
    chip = kernel.chip
    return shared_bytes(kernel, tile) <= chip.shared_memory and registers(kernel, tile) <= chip.thread_registers


# ---------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True, kw_only=True)
class Work:
    """A call as the model of time sees it.

    `visited(block_m, block_n)`: scores that blocks of that size compute for each score that is kept.
    `programs(block_m, block_n)`: the kernel's programs.
    """

    multiprocessors: int
    visited: Callable[[int, int], float]
    programs: Callable[[int, int], int]


# Relative times, of a kernel's own work on one multiprocessor. From sweeps of causal kernels on an H100.
_EXPONENTIALS = 0.45
"""Exponentials and row vectors; the matrix products of the same scores at head_dim 64 take 1."""

_STAGE_PENALTY = {1: 1.35, 2: 1.04}
_ROWS_PENALTY = {16: 1.9, 32: 1.35, 64: 1.08}
"""Short tiles read keys and values more often for each product."""

_PROLOGUE = 0.25
"""Time of a program before and after its loop, in blocks of 128 by 128 scores."""


def seconds(kernel: Kernel, tile: TileConfig, work: Work) -> float:
    """A guess at the time of a call, in an arbitrary unit: good for ordering only."""
    own, streamed = (tile.block_n, tile.block_m) if kernel.pass_ is Pass.DKDV else (tile.block_m, tile.block_n)
    products = kernel.columns / 64 * {Pass.FWD: 1.0, Pass.DQ: 1.5, Pass.DKDV: 2.0}[kernel.pass_]
    threads = tile.num_warps * kernel.chip.lanes
    by_memory = kernel.chip.shared_memory // max(shared_bytes(kernel, tile), 1)
    by_registers = kernel.chip.registers // (threads * max(registers(kernel, tile), 1))
    resident = max(1, min(by_memory, by_registers, _MOST_WARPS // tile.num_warps))
    # The exponentials of one group of warps hide behind the products of another.
    groups = resident * max(1, tile.num_warps // 4)
    hidden = 0.0 if groups == 1 else 0.6
    block = max(products, _EXPONENTIALS) + (1 - hidden) * min(products, _EXPONENTIALS)
    block *= _STAGE_PENALTY.get(tile.num_stages, 1.0) * _ROWS_PENALTY.get(own, 1.0)
    block *= 1.0 + 8.0 / streamed
    if own < 16 * tile.num_warps:
        block *= 1.25  # warps share rows: their sums cross warps
    if registers(kernel, tile) > 200:
        block *= 1.1
    programs = work.programs(tile.block_m, tile.block_n)
    slots = work.multiprocessors * resident
    tail = 1 + slots / (2 * max(programs, 1))
    scores = work.visited(tile.block_m, tile.block_n)
    per_program = _PROLOGUE * programs * 128 * 128 / (work.multiprocessors * 2_000_000)
    return block * scores * tail + per_program


# --------------------------------------------------------------------------------------------------------------- space


def spans(rows: Iterable[PassConfigs], kernel: Kernel) -> Mapping[str, tuple[int, ...]]:
    """Field of a tile -> its values from the least to the greatest in the tables, and one step more on each side.

    Tiles of wide head_dims are smaller than others: they count for wide head_dims only.
    """
    tiles = [
        tile
        for passes in rows
        for head_dim, tile in passes.get(kernel.pass_, {}).items()
        if (head_dim > NARROW_HEAD_DIM) == kernel.is_wide
    ]
    found = {}
    for name, allowed in TILE_FIELDS.items():
        places = [allowed.index(getattr(tile, name)) for tile in tiles]
        found[name] = allowed[max(0, min(places) - 1) : max(places) + 2]
    return found


def tables(arch: ArchSpec, itemsize: int) -> list[PassConfigs]:
    """The tables of an architecture that hold tiles for inputs of `itemsize` bytes."""
    return [arch.float32] if itemsize == 4 else [arch.half, *arch.short.values()]


def known(archs: Iterable[ArchSpec], kernel: Kernel) -> Iterator[TileConfig]:
    """The tiles that the spec has for the kernel: from each table, the row that serves its head_dim."""
    for arch in archs:
        for passes in tables(arch, kernel.itemsize):
            rows = passes.get(kernel.pass_, {})
            serving = [head_dim for head_dim in rows if head_dim >= kernel.head_dim]
            if serving:
                yield rows[min(serving)]


def candidates(kernel: Kernel, archs: Iterable[ArchSpec], first: Iterable[TileConfig], work: Work) -> list[TileConfig]:
    """All tiles worth trying: those of `first`, those of the spec, then the rest of the space by the model of time."""
    archs = list(archs)
    span = spans([passes for arch in archs for passes in tables(arch, kernel.itemsize)], kernel)
    space = (TileConfig(**dict(zip(span, values, strict=True))) for values in itertools.product(*span.values()))
    modelled = sorted((tile for tile in space if fits(kernel, tile)), key=lambda tile: seconds(kernel, tile, work))
    return list(dict.fromkeys([*first, *known(archs, kernel), *modelled]))
