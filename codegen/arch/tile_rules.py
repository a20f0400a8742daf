"""The constraints on block sizes and launch options, stated once for loader, tuner, lint and JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping

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
"""Field of a `TileConfig` -> the values it may take."""


def tile_problems(config: Mapping[str, int]) -> list[tuple[str, str]]:
    """The fields of a config whose value is out of range, each with what is wrong.

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
