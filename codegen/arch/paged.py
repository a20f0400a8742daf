"""Default tiles of the kernels on paged caches, for every chip, from the bytes that a program copies ahead.

A decoding step is bound by memory: it needs many bytes in flight, and two or more programs per multiprocessor. `archs:`
of a spec overrides single entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from codegen.arch.chips import CHIPS, HOPPER, Chip
from codegen.arch.tile_rules import BLOCK_SIZES, NARROW_HEAD_DIM, TileConfig


class PagedPass(StrEnum):
    """The kernels on paged caches by how many rows a sequence has: query heads of a group times new tokens."""

    DECODE = "decode"
    PAGED_FWD = "paged_fwd"


LEAST_KEYS, WIDE_LEAST_KEYS = 128, 512
"""Default least keys of a split, and those of wide heads: merging smaller splits costs more than they gain."""


@dataclass(frozen=True, kw_only=True)
class PagedTileConfig(TileConfig):
    """Config of a kernel on paged caches.

    `block_m` of `decode` is a lower bound: a tile holds all rows of a sequence, so that its keys are read once. No
    split of a sequence has fewer than `keys_per_split` keys, rounded up to whole blocks.
    """

    keys_per_split: int = LEAST_KEYS


HEAD_DIMS = (64, 128, 192, 256, 576)
"""The largest head_dims that entries of the tables serve; the last is that of latent attention's caches."""

_ROWS = {PagedPass.DECODE: 16, PagedPass.PAGED_FWD: 128}
_WARPS = {PagedPass.DECODE: 4, PagedPass.PAGED_FWD: 8}
_KEYS = (64, 32, 16)
_MOST_STAGES, _LEAST_STAGES = 3, 2


@cache
def default_paged_tiles(arch: str, pass_: PagedPass, itemsize: int) -> Mapping[int, PagedTileConfig]:
    """Largest head_dim served -> tile, for queries of `itemsize` bytes.

    >>> default_paged_tiles("sm_90", PagedPass.DECODE, 2)[128]
    PagedTileConfig(block_m=16, block_n=64, num_warps=4, num_stages=3, keys_per_split=128)
    """
    return {head_dim: _tile(arch, pass_, itemsize, head_dim) for head_dim in HEAD_DIMS}


def _tile(arch: str, pass_: PagedPass, itemsize: int, head_dim: int) -> PagedTileConfig:
    """The tile with the most keys in flight whose keys and values fit their part of the shared memory."""
    chip = CHIPS[arch]
    if head_dim > NARROW_HEAD_DIM:
        return _wide_tile(chip, pass_, itemsize)
    # 160 KiB on an H100, and the same part on NVIDIA's other chips. On AMD the pipeline keeps a block in registers.
    budget = 160 * 1024 * chip.shared_memory // HOPPER.shared_memory if chip.is_nvidia else chip.shared_memory
    row_bytes = 2 * head_dim * itemsize
    # A product in float32 holds both tiles in registers: with more keys or fewer warps, prompts spill kilobytes.
    in_registers = itemsize == 4 and pass_ is PagedPass.PAGED_FWD
    choices = [keys for keys in _KEYS if keys <= 32] if in_registers else _KEYS
    fitting = [keys for keys in choices if keys * row_bytes * _LEAST_STAGES <= budget]
    block_n = fitting[0] if fitting else _KEYS[-1]
    if in_registers:
        block_m = 32 if head_dim > 128 else 64
        return PagedTileConfig(block_m=block_m, block_n=block_n, num_warps=8, num_stages=_LEAST_STAGES)
    num_stages = _MOST_STAGES if block_n * row_bytes * _MOST_STAGES <= budget else _LEAST_STAGES
    block_m = _ROWS[pass_]
    while block_m > BLOCK_SIZES[0] and block_m * head_dim * itemsize > chip.shared_memory // 2:
        block_m //= 2
    num_warps = min(_WARPS[pass_], max(block_m // 16, 4))
    return PagedTileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def _wide_tile(chip: Chip, pass_: PagedPass, itemsize: int) -> PagedTileConfig:
    """The tile of heads of more than NARROW_HEAD_DIM columns, those of latent attention."""
    if itemsize == 4:
        return PagedTileConfig(block_m=16, block_n=16, num_warps=8, num_stages=2)
    if pass_ is PagedPass.DECODE:
        # Two programs of four warps fit a processor. The sums of a split are as long as 14 keys for each row.
        return PagedTileConfig(block_m=16, block_n=32, num_warps=4, num_stages=3, keys_per_split=WIDE_LEAST_KEYS)
    # 64 such rows need the registers of eight warps. Queries and two blocks of keys take 216 KiB.
    block_n, num_stages = (64, 2) if chip.has_wgmma else (32, 3)
    return PagedTileConfig(block_m=64, block_n=block_n, num_warps=8, num_stages=num_stages)
