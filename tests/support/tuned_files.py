"""Tiles of `causal`, and the path of the tuned file of an invented GPU."""

from __future__ import annotations

from pathlib import Path

from codegen.arch.tile_rules import TileConfig
from generated._runtime import kernels

HASH = kernels.KERNEL_HASHES["causal"]["dense"]["fwd"]


def tile(block_m: int, block_n: int, num_warps: int = 8, num_stages: int = 2) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def path_in(folder: Path) -> Path:
    return folder / "tuned" / "imaginary_1" / "causal.json"
