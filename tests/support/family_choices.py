"""The tiles, and so the families of kernels, of a call: by default a causal one of 128 columns on Hopper."""

from __future__ import annotations

from typing import Any

from generated._runtime.core.configs import Tile, tiles_for
from generated._runtime.core.options import checked_options
from generated._runtime.core.tiles import MaskSizes

LENGTH = 4096


def forward(
    variant: str = "causal",
    mode: str = "dense",
    arch: str = "sm_90",
    dtype: str = "bfloat16",
    head_dims: tuple[int, int] = (128, 128),
    length: int = LENGTH,
    config: object = None,
    family: str | None = None,
    band_keys: int | None = None,
    run_unit: int | None = None,
) -> Tile:
    options = checked_options(variant, config, family)
    return tiles_for(
        variant, mode, arch, "", dtype, head_dims, (8, 2), length, options, MaskSizes(band_keys, run_unit)
    )["fwd"]


def backward(
    variant: str = "causal",
    mode: str = "dense",
    head_dims: tuple[int, int] = (128, 128),
    length: int = LENGTH,
    config: object = None,
    family: str | None = None,
    deterministic: bool | None = None,
    band_keys: int | None = None,
    run_unit: int | None = None,
) -> tuple[Tile, Tile]:
    """The tiles of dkdv and dq."""
    options = checked_options(variant, config, family, deterministic)
    tiles = tiles_for(
        variant, mode, "sm_90", "", "bfloat16", head_dims, (8, 2), length, options, MaskSizes(band_keys, run_unit)
    )
    return tiles["dkdv"], tiles["dq"]


def families(*args: Any, **options: Any) -> list[str]:
    return [tile.family for tile in backward(*args, **options)]
