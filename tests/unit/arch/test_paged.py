"""Default tiles of the kernels on paged caches."""

from __future__ import annotations

import doctest

import pytest

from codegen.arch import paged
from codegen.arch.chips import ARCHS, CHIPS
from codegen.arch.paged import HEAD_DIMS, PagedPass, default_paged_tiles
from codegen.arch.tile_rules import tile_problems


def test_examples() -> None:
    assert doctest.testmod(paged, raise_on_error=True).attempted > 0


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("pass_", list(PagedPass))
@pytest.mark.parametrize("arch", ARCHS)
def test_a_tile_of_every_head_dim_is_legal_and_fits(arch: str, pass_: PagedPass, itemsize: int) -> None:
    tiles = default_paged_tiles(arch, pass_, itemsize)
    assert tuple(tiles) == HEAD_DIMS
    for head_dim, tile in tiles.items():
        fields = {name: getattr(tile, name) for name in ("block_m", "block_n", "num_warps", "num_stages")}
        assert not tile_problems(fields)
        assert tile.keys_per_split % tile.block_n == 0
        # Without wgmma, a pipeline of Triton keeps one block fewer in shared memory than it has stages.
        held = (tile.num_stages - 1) * tile.block_n * 2 * head_dim * itemsize
        if head_dim <= 256:
            assert held <= CHIPS[arch].shared_memory


def test_more_shared_memory_never_gives_smaller_blocks() -> None:
    for head_dim in HEAD_DIMS:
        small, large = (default_paged_tiles(arch, PagedPass.DECODE, 2)[head_dim] for arch in ("sm_89", "sm_90"))
        assert (small.block_n, small.num_stages) <= (large.block_n, large.num_stages)
