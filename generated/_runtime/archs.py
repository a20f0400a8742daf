# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/archs.py.jinja
# hash: 751c3bf7d2b955a9
"""Chips, the rules for tiles, and default tiles: those of the spec's `archs:`, and those of Hopper's family."""

from .core.tiles import ArchTiles, HopperFamily, HopperTile, PagedTile, Tile

MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 512
NARROW_HEAD_DIM = 256
MAX_PAGED_HEAD_DIM = 576

# Field of a tile -> the values that it may have.
TILE_VALUES: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
}

# Chip without tiles of its own -> the chip whose tiles it runs with: same instructions, no less shared memory.
SAME_TILES: dict[str, str] = {
    "sm_86": "sm_89",
    "sm_87": "sm_80",
    "sm_103": "sm_100",
    "sm_121": "sm_120",
}

# The number of multiprocessors that kernels are planned for if no GPU is present: that of an H100.
DEFAULT_MULTIPROCESSORS = 132

HOPPER_FAMILY = HopperFamily(
    arch="sm_90",
    launch_warps=4,
    least_head_dim=33,
    forward_tiles={
        64: HopperTile(block_m=128, block_n=128, num_warps=8, num_stages=3),
        128: HopperTile(block_m=128, block_n=128, num_warps=8, num_stages=2),
        256: HopperTile(block_m=128, block_n=64, num_warps=8, num_stages=2),
    },
    long_forward_tile=HopperTile(block_m=192, block_n=128, num_warps=12, num_stages=2),
    mixed_forward_tile=HopperTile(block_m=128, block_n=128, num_warps=8, num_stages=2),
    wide_forward_tile=HopperTile(block_m=64, block_n=32, num_warps=8, num_stages=2),
    most_columns=512,
    least_half=65,
    long_forward_from=4096,
    long_forward_from_if_alike=2048,
    backward_tiles={
        64: HopperTile(block_m=128, block_n=128, num_warps=8, num_stages=2),
        128: HopperTile(block_m=64, block_n=128, num_warps=8, num_stages=2),
        256: HopperTile(block_m=64, block_n=64, num_warps=8, num_stages=2),
    },
    split_tiles={
        "dkdv": HopperTile(block_m=32, block_n=64, num_warps=8, num_stages=2),
        "dq": HopperTile(block_m=64, block_n=32, num_warps=8, num_stages=2),
    },
    distance_tiles={
        64: HopperTile(block_m=128, block_n=128, num_warps=8, num_stages=3),
        128: HopperTile(block_m=128, block_n=64, num_warps=8, num_stages=2),
        256: HopperTile(block_m=64, block_n=32, num_warps=8, num_stages=2),
    },
    scored_rows=64,
    narrow_forward_from=1024,
    narrow_forward_from_if_alike=512,
    narrow_forward_from_if_overlapped=2048,
    packed_forward_from={64: 768, 128: 96, 256: 64},
    fused_backward_from={64: 1536, 128: 1024, 256: 1024},
    packed_fused_backward_from={64: 1536, 128: 1024, 256: 2560},
    mixed_backward_from=3072,
)

# Architecture -> its default tiles.
ARCHS: dict[str, ArchTiles] = {
    "gfx942": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=4, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
            },
            "dq": {
                64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=32, block_n=16, num_warps=4, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=1),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=1),
                128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=64, block_n=32, num_warps=4, num_stages=1),
                512: Tile(block_m=64, block_n=16, num_warps=8, num_stages=1),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
            },
            "dq": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
            },
            "fwd": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=4, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
            },
        },
        short={},
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=64, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=64, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
    "sm_100": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=64, block_n=64, num_warps=8, num_stages=2),
                128: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                256: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=128, num_warps=8, num_stages=2),
                128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=2),
                256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
            },
        },
        short={},
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
    "sm_120": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=2),
                128: Tile(block_m=32, block_n=64, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=32, block_n=16, num_warps=4, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=2),
                128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                256: Tile(block_m=64, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
                320: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=32, block_n=16, num_warps=4, num_stages=1),
                128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                320: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                320: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
            },
        },
        short={},
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=128, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=64, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
    "sm_80": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=64, block_n=128, num_warps=8, num_stages=2),
                128: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                128: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                256: Tile(block_m=64, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                256: Tile(block_m=64, block_n=64, num_warps=8, num_stages=2),
                512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                128: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                256: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
            },
        },
        short={},
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=128, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=3, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
    "sm_89": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=2),
                128: Tile(block_m=32, block_n=64, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=1),
                256: Tile(block_m=32, block_n=16, num_warps=4, num_stages=1),
                512: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=2),
                128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                256: Tile(block_m=64, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=4, num_stages=1),
                320: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=32, block_n=16, num_warps=4, num_stages=1),
                128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                320: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=1),
                128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                320: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
            },
        },
        short={},
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=128, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=64, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=3, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=16, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
    "sm_90": ArchTiles(
        half={
            "dkdv": {
                64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
            },
        },
        float32={
            "dkdv": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "dq": {
                64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
            },
            "fwd": {
                64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
            },
        },
        short={
            512: {
                "dkdv": {
                    64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                },
            },
            1024: {
                "dkdv": {
                    64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                },
            },
            2048: {
                "dkdv": {
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                },
                "dq": {
                    128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                },
                "fwd": {
                    128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                },
            },
        },
        paged_half={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
            },
            "paged_fwd": {
                64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
        paged_float32={
            "decode": {
                64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
            "paged_fwd": {
                64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
            },
        },
    ),
}

# Variant -> architecture -> the tiles that it runs with instead.
VARIANT_ARCHS: dict[str, dict[str, ArchTiles]] = {
    "full": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "window": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "document": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "natten": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=16, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=16, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=64, block_n=16, num_warps=4, num_stages=4),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=16, num_warps=4, num_stages=4),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "softcap": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "gemma2_local": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "relative_bias": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "forgetting": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "forgetting_pruned": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "gpt_oss": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "band_softcap": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "band_sink": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
    "band_mask": {
        "sm_90": ArchTiles(
            half={
                "dkdv": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=64, block_n=128, num_warps=8, num_stages=3),
                    192: Tile(block_m=32, block_n=128, num_warps=8, num_stages=2),
                    256: Tile(block_m=32, block_n=64, num_warps=8, num_stages=3),
                    512: Tile(block_m=32, block_n=32, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    80: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
                    96: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    256: Tile(block_m=128, block_n=32, num_warps=8, num_stages=2),
                    512: Tile(block_m=32, block_n=64, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    96: Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
                    128: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    192: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                    256: Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
                    512: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                },
            },
            float32={
                "dkdv": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=32, block_n=32, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "dq": {
                    64: Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
                    128: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    256: Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
                },
                "fwd": {
                    64: Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
                    128: Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
                    256: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                    512: Tile(block_m=16, block_n=32, num_warps=8, num_stages=1),
                },
            },
            short={
                512: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                        128: Tile(block_m=64, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                1024: {
                    "dkdv": {
                        64: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        64: Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
                2048: {
                    "dkdv": {
                        128: Tile(block_m=32, block_n=64, num_warps=4, num_stages=3),
                    },
                    "dq": {
                        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=2),
                    },
                    "fwd": {
                        128: Tile(block_m=128, block_n=32, num_warps=4, num_stages=3),
                    },
                },
            },
            paged_half={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=512),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    192: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=128, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
            paged_float32={
                "decode": {
                    64: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128),
                    128: PagedTile(block_m=16, block_n=64, num_warps=4, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=128),
                    256: PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
                "paged_fwd": {
                    64: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    128: PagedTile(block_m=64, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    192: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    256: PagedTile(block_m=32, block_n=32, num_warps=8, num_stages=2, keys_per_split=128),
                    576: PagedTile(block_m=16, block_n=16, num_warps=8, num_stages=2, keys_per_split=128),
                },
            },
        ),
    },
}
