"""The family of kernels written in Gluon for Hopper: its tiles, and the lengths from which it is the faster family.

Rendering writes `FAMILY` into `_runtime/archs.py`; `_runtime/core/families.py` decides from there. All numbers were
measured on an H100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codegen.arch.chips import HOPPER
from codegen.arch.tile_rules import TileConfig

NAME = "hopper"
"""The family, as in `family=` of a call."""

ARCH = HOPPER.name


def _tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


@dataclass(frozen=True, kw_only=True)
class HopperFamily:
    """Tiles and thresholds. Every key of a mapping is the number of columns of a tile: those of q and k or those of v,
    whichever are more. Every length is a number of keys.

    Attributes:
        arch: the only chip that runs these kernels.
        launch_warps: warps that a kernel is launched with: one warpgroup, which starts the others.
        least_head_dim: smallest head_dim. The columns of a tile are a power of two, and most products leave out those
            that pad a head.
        forward_tiles: tiles of the forward: 64 rows for each of two warpgroups, and as many keys and pipeline stages as
            fit shared memory.
        long_forward_tile: tile at 64 columns of long dense calls, if products compute whole scores and every query
            attends to one key range that starts at key 0. Three warpgroups hide each other's exponentials, but more of
            their tiles are cut by the mask, and no registers are left for a score expression.
        mixed_forward_tile: tile if q and k have 129 to 192 columns, and v at most 128: q and k are then stored without
            their padding.
        wide_forward_tile: tile of the forward of more columns than `forward_tiles` have, up to `most_columns`.
            Two warpgroups share the columns of v, and a third one computes the weights of its 64 rows for both.
        least_half: smallest head_dim that is added up in two halves, which have 64 columns at least.
        long_forward_from: length from which on `long_forward_tile` is used.
        long_forward_from_if_alike: the same if all rows attend to the same keys, so that the mask cuts no tile.
        backward_tiles: tiles of the backward, whose two warpgroups share the keys.
        split_tiles: tiles of the backward of more columns, by pass: a launch for each gradient. dk and dv hold 64 keys
            and copy 32 rows at a time; dq holds 64 rows and copies 32 keys.
        distance_tiles: tiles of the portable kernel that sums ds by distance beside these backwards.
        scored_rows: most rows of a backward tile if the score is more than the scaled product, or dropout is applied:
            then the score of half of the rows fills the registers. Dense calls of a capped product have all rows: few
            of their blocks need a mask, for which registers spill.
        narrow_forward_from: length from which on the forward at 64 columns is the faster one.
        narrow_forward_from_if_alike: the same if all rows attend to the same keys.
        narrow_forward_from_if_overlapped: the same if the score is costly, and computed beside the exponentials.
        packed_forward_from: average length from which on the forward of packed calls is the faster one.
        fused_backward_from: length from which on one kernel for dq, dk and dv is faster than a portable dq beside
            Hopper's dk and dv: the fused kernel clears and converts its sum of dq, whatever the length.
        packed_fused_backward_from: the same for packed sequences, by their average length.
        mixed_backward_from: length from which the backward is the faster one if the wider of k and v has 129 to 192
            columns, and the other at most 128. The portable kernels then pad less.
    """

    arch: str = ARCH
    launch_warps: int = 4
    least_head_dim: int
    forward_tiles: Mapping[int, TileConfig]
    long_forward_tile: TileConfig
    mixed_forward_tile: TileConfig
    wide_forward_tile: TileConfig
    most_columns: int
    least_half: int
    long_forward_from: int
    long_forward_from_if_alike: int
    backward_tiles: Mapping[int, TileConfig]
    split_tiles: Mapping[str, TileConfig]
    distance_tiles: Mapping[int, TileConfig]
    scored_rows: int
    narrow_forward_from: int
    narrow_forward_from_if_alike: int
    narrow_forward_from_if_overlapped: int
    packed_forward_from: Mapping[int, int]
    fused_backward_from: Mapping[int, int]
    packed_fused_backward_from: Mapping[int, int]
    mixed_backward_from: int

    def columns(self, head_dim: int) -> int:
        """Columns of the tile that holds a head_dim that the family serves."""
        return min(columns for columns in self.forward_tiles if columns >= head_dim)

    def serves_head_dim(self, head_dim: int) -> bool:
        """True if the family has tiles for a head_dim, forward and backward."""
        return self.least_head_dim <= head_dim <= max(self.forward_tiles)

    def serves_forward(self, head_dim: int) -> bool:
        """True if the family has a tile for the forward of a head_dim."""
        return self.least_head_dim <= head_dim <= self.most_columns


FAMILY = HopperFamily(
    least_head_dim=33,
    forward_tiles={64: _tile(128, 128, 8, 3), 128: _tile(128, 128, 8, 2), 256: _tile(128, 64, 8, 2)},
    long_forward_tile=_tile(192, 128, 12, 2),
    mixed_forward_tile=_tile(128, 128, 8, 2),
    wide_forward_tile=_tile(64, 32, 8, 2),
    most_columns=512,
    least_half=65,
    long_forward_from=4096,
    long_forward_from_if_alike=2048,
    backward_tiles={64: _tile(128, 128, 8, 2), 128: _tile(64, 128, 8, 2), 256: _tile(64, 64, 8, 2)},
    split_tiles={"dkdv": _tile(32, 64, 8, 2), "dq": _tile(64, 32, 8, 2)},
    distance_tiles={64: _tile(128, 128, 8, 3), 128: _tile(128, 64, 8, 2), 256: _tile(64, 32, 8, 2)},
    scored_rows=64,
    narrow_forward_from=1024,
    narrow_forward_from_if_alike=512,
    narrow_forward_from_if_overlapped=2048,
    packed_forward_from={64: 768, 128: 96, 256: 64},
    fused_backward_from={64: 1536, 128: 1024, 256: 1024},
    packed_fused_backward_from={64: 1536, 128: 1024, 256: 2560},
    mixed_backward_from=3072,
)
