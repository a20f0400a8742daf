# SPDX-License-Identifier: Apache-2.0
"""The kernel that sums ds by distance: which block diagonals its programs compute, and where they store the sums."""

from dataclasses import replace
from typing import NamedTuple

from ..archs import HOPPER_FAMILY
from .configs import cdiv
from .families import tile_columns
from .launches import Backend, Tensor, tiles_of
from .options import CallOptions
from .tiles import HOPPER, PORTABLE, Tile

LEAST_BLOCKS = 128
"""Least number of blocks in a part of a block diagonal. Once for each part, a program evaluates the score's own tile
and sums diagonals, which takes as long as several blocks on an H100."""

MOST_PARTS = 8
"""Largest number of parts of a block diagonal: the sums of each part are stored apart."""


LAG_MARGIN = 256
"""How far the distances in a block may lie beyond those of the call: no block has more rows or keys than this."""

NOWHERE = 2**30
"""A distance beyond all others."""


class LagAxis(NamedTuple):
    """The axis of sums by distance: its size, and the index of the distance of the first query from the first key."""

    size: int
    origin: int


def lag_axis(q_len: int, kv_len: int, row_offset: int | None, near_first: int | None, near_last: int | None) -> LagAxis:
    """The axis of the sums of a call. It covers the distances of all blocks that are not far.

    Args:
        row_offset: the position of the first query; None if it differs between batch rows.
        near_first, near_last: all pairs of a distance up to `near_first` read the same elements, or the mask keeps none
            of them. The same holds from the distance `near_last` on. None without a limit.
    """
    low, high = -kv_len - LAG_MARGIN, q_len + LAG_MARGIN
    if row_offset is not None and near_first is not None:
        low = max(low, near_first - row_offset - 2 * LAG_MARGIN)
    if row_offset is not None and near_last is not None:
        high = min(high, near_last - row_offset + 2 * LAG_MARGIN)
    return LagAxis(max(high - low, 0), -low)


class Bands(NamedTuple):
    """The programs of a call.

    They compute `num_bands` block diagonals from `first_band` on, each in `num_parts` parts of `part_blocks` blocks of
    rows. The sums of one head take `pieces` lines. Blocks whose distances are all up to `near_first`, or all from
    `near_last` on, are far. `has_far`: there may be far blocks.
    """

    tile: Tile
    first_band: int
    num_bands: int
    part_blocks: int
    num_parts: int
    near_first: int
    near_last: int
    has_far: bool

    @property
    def pieces(self) -> int:
        """Lines of sums that each head has."""
        return self.num_parts * 2 * (self.tile.block_m // self.tile.block_n)


def distance_tile(backend: Backend, op: str, q: Tensor, v: Tensor, options: CallOptions, family: str) -> Tile:
    """The tile of this kernel in a call whose dk and dv are computed by the kernels of `family`."""
    if family == HOPPER:
        columns = max(tile_columns(x.shape[3]) for x in (q, v))
        return Tile(*HOPPER_FAMILY.distance_tiles[columns])
    tile = tiles_of(backend, op, "dense", q, v, replace(options, family=PORTABLE))["dq"]
    # Each stage holds a block of queries and one of keys. dq's kernel keeps its one block of queries in all stages:
    # take as many stages as fit into the memory that dq's kernel uses.
    block = min(tile.block_m, tile.block_n)
    stages = min(tile.num_stages, (tile.block_m + tile.num_stages * tile.block_n) // (2 * block))
    return tile._replace(block_m=block, block_n=block, num_stages=stages)


def bands_of(
    tile: Tile,
    q_len: int,
    kv_len: int,
    row_offset: int | None,
    least: int | None,
    most: int | None,
    near_first: int | None = None,
    near_last: int | None = None,
    *,
    serves_far: bool = True,
) -> Bands:
    """The bands of a call.

    Args:
        row_offset: the position of the first query; None if it differs between batch rows.
        least, most: the mask keeps only pairs of distances from `least` to `most`; None without a limit.
        near_first, near_last: as for `lag_axis`. A square of `block_m` rows and keys is far if all of its distances are
            from `near_last` on, or all up to `near_first`.
        serves_far: whether there are programs for bands of far squares.
    """
    rows, keys = tile.block_m, tile.block_n
    row_blocks = cdiv(q_len, rows)
    first, last = 1 - cdiv(kv_len, keys), row_blocks * (rows // keys) - 1
    if row_offset is not None and least is not None:
        first = max(first, cdiv(least - row_offset - rows + 1, keys))
    if row_offset is not None and most is not None:
        last = min(last, (most - row_offset + keys - 1) // keys)
    first_near, last_near = first, last
    if row_offset is not None and near_first is not None:
        least_square = (near_first - row_offset - rows + 1) // rows * rows + rows
        first_near = max(first, cdiv(least_square - rows + 1, keys))
    if row_offset is not None and near_last is not None:
        last_near = min(last, (near_last - row_offset + rows - 2) // rows * rows // keys)
    has_far = row_offset is None or (first_near, last_near) != (first, last)
    if not serves_far:
        first, last = first_near, last_near
    part_blocks = max(LEAST_BLOCKS, cdiv(row_blocks, MOST_PARTS))
    return Bands(
        tile=tile,
        first_band=first,
        num_bands=max(last - first + 1, 0),
        part_blocks=part_blocks,
        num_parts=max(cdiv(row_blocks, part_blocks), 1),
        near_first=-NOWHERE if near_first is None else near_first,
        near_last=NOWHERE if near_last is None else near_last,
        has_far=has_far,
    )
