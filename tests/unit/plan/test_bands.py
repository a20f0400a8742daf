"""Which block diagonals the kernel that sums ds by distance serves."""

from __future__ import annotations

import itertools

import pytest

from generated._runtime.core.configs import cdiv
from generated._runtime.core.distances import LAG_MARGIN, LEAST_BLOCKS, bands_of, lag_axis
from generated._runtime.core.tiles import Tile

LENGTHS = [(1, 1), (40, 40), (33, 200), (200, 33), (1300, 1300), (2100, 50)]
TILES = [Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(64, 16, 4, 1)]


@pytest.mark.parametrize("offset", [0, 70, -30, None])
@pytest.mark.parametrize("limits", [(None, None), (0, None), (0, 24), (-5, 5)])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_every_kept_block_has_one_program(
    q_len: int, kv_len: int, tile: Tile, limits: tuple[int | None, int | None], offset: int | None
) -> None:
    least, most = limits
    bands = bands_of(tile, q_len, kv_len, offset, least, most)
    ratio = tile.block_m // tile.block_n
    served = range(bands.first_band, bands.first_band + bands.num_bands)
    row_blocks = cdiv(q_len, tile.block_m)
    assert bands.num_parts * bands.part_blocks >= row_blocks
    num_lags, origin = lag_axis(q_len, kv_len, offset, None, None)
    for row, key in itertools.product(range(row_blocks), range(cdiv(kv_len, tile.block_n))):
        band = row * ratio - key
        lags = range(band * tile.block_n - tile.block_n + 1, band * tile.block_n + tile.block_m)
        shift = 0 if offset is None else offset
        keeps = any((least is None or x + shift >= least) and (most is None or x + shift <= most) for x in lags)
        if keeps or offset is None:
            assert band in served
            assert origin + lags[0] >= 0
            # A diagonal may have a second entry without an element, one place further.
            assert origin + lags[-1] + 1 < num_lags


@pytest.mark.parametrize("offset", [0, 70, -300, None])
@pytest.mark.parametrize("near", [(None, None), (0, 24), (-90, None), (None, 129), (600, 601)])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_near_blocks_have_a_program_and_a_place(
    q_len: int, kv_len: int, tile: Tile, near: tuple[int | None, int | None], offset: int | None
) -> None:
    bands = bands_of(tile, q_len, kv_len, offset, None, None, *near, serves_far=False)
    ratio, side = tile.block_m // tile.block_n, tile.block_m
    served = range(bands.first_band, bands.first_band + bands.num_bands)
    axis = lag_axis(q_len, kv_len, offset, *near)
    shift = 0 if offset is None else offset
    for row, key in itertools.product(range(cdiv(q_len, tile.block_m)), range(cdiv(kv_len, tile.block_n))):
        band = row * ratio - key
        square = row * side - key * tile.block_n // side * side + shift
        is_far = square - side + 1 >= bands.near_last or square + side - 1 <= bands.near_first
        assert (band in served) == (not is_far) or offset is None
        # The kernel computes the square of a band in this way.
        assert square == (band * tile.block_n + side - 1) // side * side + shift
        lags = range(band * tile.block_n - tile.block_n + 1, band * tile.block_n + tile.block_m)
        if not is_far:
            assert axis.origin + lags[0] >= 0
            assert axis.origin + lags[-1] + 1 < axis.size


def test_a_limit_leaves_out_bands() -> None:
    tile = Tile(128, 128, 8, 2)
    causal = bands_of(tile, 1024, 1024, 0, 0, None)
    assert (causal.first_band, causal.num_bands) == (0, 8)
    assert bands_of(tile, 1024, 1024, 0, 0, 127).num_bands == 2
    assert bands_of(tile, 1024, 1024, -2000, 0, None).num_bands == 0
    assert bands_of(tile, 1024, 1024, None, 0, 127).num_bands == 15


def test_long_diagonals_have_parts() -> None:
    tile = Tile(64, 64, 4, 2)
    assert bands_of(tile, 64 * LEAST_BLOCKS, 64, 0, None, None).num_parts == 1
    assert bands_of(tile, 64 * LEAST_BLOCKS + 1, 64, 0, None, None).num_parts == 2
    assert bands_of(tile, 100_000, 64, 0, None, None).num_parts == 8


def test_the_margin_holds_every_tile() -> None:
    from generated._runtime.archs import TILE_VALUES

    assert max(max(TILE_VALUES["block_m"]), max(TILE_VALUES["block_n"])) <= LAG_MARGIN
