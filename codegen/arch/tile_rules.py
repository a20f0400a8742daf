"""The constraints on tiles and head_dims, stated once.

Loader, JSON Schema, tuner and lint read them here. Rendering writes them into `_runtime/archs.py`, where the `config=`
argument of calls is checked against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 512
"""Columns of q, k and v."""

NARROW_HEAD_DIM = 256
"""The largest head_dim that every chip serves in every dtype. Wider tiles are split into two parts, take the registers
of eight warps, and do not fit every chip's shared memory in float32."""

MAX_PAGED_HEAD_DIM = 576
"""The largest head_dim on paged caches, which have no gradient: keys of latent attention have 512 columns, and 64 more
for positions."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""`tl.dot` and the tile loads need powers of two, and a matrix instruction at least 16."""

WARP_COUNTS = (1, 2, 4, 8, 16)
"""Warps (wavefronts on AMD) of one program."""

STAGE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Depth of the software pipeline of the main loop."""

TILE_FIELDS: Mapping[str, tuple[int, ...]] = {
    "block_m": BLOCK_SIZES,
    "block_n": BLOCK_SIZES,
    "num_warps": WARP_COUNTS,
    "num_stages": STAGE_COUNTS,
}
"""Field of a `TileConfig` -> the values that it may have."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Block sizes and launch options of one kernel: `block_m` query rows by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_problems(config: Mapping[str, int]) -> list[tuple[str, str]]:
    """The fields of a config whose value breaks a rule, each with the rule and the nearest legal values.

    >>> tile_problems({"block_m": 48, "block_n": 64})
    [('block_m', 'must be a power of two from 16 to 256, got 48; the nearest are 32 and 64')]
    """
    problems = []
    for name, allowed in TILE_FIELDS.items():
        if name in config and config[name] not in allowed:
            rule = f"must be {_kind(allowed)} from {allowed[0]} to {allowed[-1]}, got {config[name]}"
            problems.append((name, rule + _nearest(config[name], allowed)))
    return problems


def _kind(allowed: tuple[int, ...]) -> str:
    return "an integer" if allowed is STAGE_COUNTS else "a power of two"


def _nearest(value: int, allowed: tuple[int, ...]) -> str:
    below = [a for a in allowed if a < value][-1:]
    above = [a for a in allowed if a > value][:1]
    near = [str(a) for a in below + above]
    return f"; the nearest {'is' if len(near) == 1 else 'are'} {' and '.join(near)}"
