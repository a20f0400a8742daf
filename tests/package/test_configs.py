"""The columns of tiles by head_dim, and what they require of a chip's tiles."""

from __future__ import annotations

import doctest

import pytest

from generated._runtime.core import configs
from generated._runtime.core.configs import Tile, Tiles, block_columns, next_power_of_2, tiles_for
from generated._runtime.core.options import checked_options

HEAD_DIMS = range(16, 257)


def test_examples() -> None:
    assert doctest.testmod(configs, raise_on_error=True).attempted > 0


def test_columns() -> None:
    """One part, or two if that takes fewer columns; a product takes at least 16 columns."""
    for head_dim in HEAD_DIMS:
        first, whole = block_columns(head_dim), next_power_of_2(head_dim)
        second = max(next_power_of_2(head_dim - whole // 2), 16)
        fewer = head_dim % 8 == 0 and whole // 2 + second < whole
        assert first == (whole // 2 if fewer else whole), head_dim


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "num_stages"),
    [(64, 64, 1), (112, 112, 1), (64, 128, 2), (112, 128, 1), (80, 80, 2), (64, 80, 2), (48, 64, 2), (192, 128, 2)],
)
def test_tiles_of_several_widths_get_a_pipeline(head_dim: int, head_dim_v: int, num_stages: int) -> None:
    tile = Tile(64, 64, 4, 1)
    own = dict.fromkeys(configs.PASSES, tile._asdict())

    def chosen(arch: str, dtype: str) -> Tiles:
        dims, options = (head_dim, head_dim_v), checked_options("causal", own)
        return tiles_for("causal", "dense", arch, "", dtype, dims, (1, 1), 1024, options)

    assert chosen("sm_90", "bfloat16") == dict.fromkeys(configs.PASSES, tile._replace(num_stages=num_stages))
    assert chosen("sm_80", "bfloat16") == dict.fromkeys(configs.PASSES, tile)
    assert chosen("sm_90", "float32") == dict.fromkeys(configs.PASSES, tile)
