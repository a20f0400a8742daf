"""The kernel that sums ds by distance: which block diagonals its programs serve, and where their sums lie."""

from dataclasses import replace
from typing import NamedTuple

from ..archs import HOPPER_FAMILY
from .configs import cdiv
from .families import tile_columns
from .launches import Backend, Tensor, tiles_of
from .options import CallOptions
from .tiles import HOPPER, PORTABLE, Tile

LEAST_BLOCKS = 128
"""Blocks of a part of a block diagonal at least. Each part evaluates the score's own tile and sums diagonals once, and
takes as long for that as for several blocks on an H100."""

MOST_PARTS = 8
"""Parts of a block diagonal at most: the sums of each are stored apart."""


LAG_MARGIN = 256
"""Distances beyond those of a call that a block may have: no block has more rows or keys."""

NOWHERE = 2**30
"""A distance beyond all others."""


class LagAxis(NamedTuple):
    """The axis of sums by distance: its size, and where the distance of the first query from the first key is."""

    size: int
    origin: int


def lag_axis(q_len: int, kv_len: int, row_offset: int | None, near_first: int | None, near_last: int | None) -> LagAxis:
    """The axis of the sums of a call, which has the distances of all blocks that are not far.

    Args:
        row_offset: the position of the first query; None if it differs between batch rows.
        near_first, near_last: up to that distance, and from that one on, all pairs read the same elements, or the mask
            keeps none; None without a limit.
    """
    low, high = -kv_len - LAG_MARGIN, q_len + LAG_MARGIN
    if row_offset is not None and near_first is not None:
        low = max(low, near_first - row_offset - 2 * LAG_MARGIN)
    if row_offset is not None and near_last is not None:
        high = min(high, near_last - row_offset + 2 * LAG_MARGIN)
    return LagAxis(max(high - low, 0), -low)


class Bands(NamedTuple):
    """The programs of a call: `num_bands` block diagonals from `first_band` on, each in `num_parts` of `part_blocks`
    blocks of rows; their sums of a head lie in `pieces` lines. Blocks are far behind `near_last`, and ahead of
    `near_first`: with `has_far` there may be such."""

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
    """The tile of a call whose dk and dv are computed by a family."""
    if family == HOPPER:
        columns = max(tile_columns(x.shape[3]) for x in (q, v))
        return Tile(*HOPPER_FAMILY.distance_tiles[columns])
    tile = tiles_of(backend, op, "dense", q, v, replace(options, family=PORTABLE))["dq"]
    # Blocks of queries are loaded like those of keys, and dq's kernel keeps them: as many stages as fit its memory.
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
        least, most: the mask keeps no pair of another distance; None without a limit.
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
