"""Which family of kernels a forward runs in: what Hopper's serves, what a call may ask for, what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from generated._runtime.checks import ArgumentError
from generated._runtime.configs import Tile, config_text, tiles_for
from generated._runtime.families import HopperTile, hopper_tile, is_faster

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
    prefers_hopper: bool = True,
) -> Tile:
    words = config_text(variant, config, family)
    return tiles_for(variant, mode, arch, "", dtype, head_dims, (8, 2), length, words, prefers_hopper)["fwd"]


def backward(
    variant: str = "causal",
    head_dims: tuple[int, int] = (128, 128),
    config: object = None,
    family: str | None = "hopper",
    launches_backward: bool = True,
) -> tuple[Tile, Tile]:
    """The tiles of dkdv and dq."""
    words = config_text(variant, config, family)
    dtype, heads = "bfloat16", (8, 2)
    tiles = tiles_for(
        variant, "dense", "sm_90", "", dtype, head_dims, heads, LENGTH, words, launches_backward, launches_backward
    )
    return tiles["dkdv"], tiles["dq"]


def families(*args: Any, **options: Any) -> list[str]:
    return [tile.family for tile in backward(*args, **options)]


def test_a_backward_runs_on_hopper_where_it_is_asked_for() -> None:
    assert backward() == (HopperTile(64, 128, 8, 2),) * 2
    assert backward(head_dims=(64, 64)) == (HopperTile(128, 128, 8, 2),) * 2
    assert backward("softcap", (64, 64)) == (HopperTile(64, 128, 8, 2),) * 2
    assert families() == ["hopper", "hopper"]
    for family in (None, "portable"):
        assert families(family=family) == ["portable", "portable"]
    assert families(launches_backward=False) == ["portable", "portable"]
    assert families(head_dims=(256, 256)) == ["portable", "portable"]


def test_a_portable_dq_beside_a_backward_on_hopper() -> None:
    for variant in ("forgetting", "relative_bias"):
        assert families(variant) == ["hopper", "portable"]
    own = {"dq": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}}
    assert families(config=own) == ["hopper", "portable"]
    assert backward(config=own)[1] == Tile(64, 64, 4, 2)


def test_a_tile_of_other_keys_is_refused_in_the_backward() -> None:
    own = {"dkdv": {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2}}
    with pytest.raises(ArgumentError, match=r"config\['dkdv'\]: expected block_m 64 or 128, block_n 128"):
        backward(config=own)


def test_long_runs_of_wide_tiles_run_on_hopper() -> None:
    assert forward() == HopperTile(128, 128, 8, 2)
    assert forward().family == "hopper"
    assert forward(head_dims=(192, 128)).family == "hopper"
    assert forward(dtype="float16").family == "hopper"


@pytest.mark.parametrize(
    "call",
    [
        {"family": "portable"},
        {"config": {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}}},
        {"arch": "sm_80"},
        {"dtype": "float32"},
        {"mode": "packed"},
        {"mode": "segmented"},
        {"variant": "causal_dropout"},
        {"head_dims": (80, 80)},
        {"length": 0},
        {"prefers_hopper": False},
        {"variant": "window"},
        {"head_dims": (64, 64)},
    ],
    ids=str,
)
def test_all_else_runs_on_the_portable_family(call: dict[str, object]) -> None:
    assert forward(**call).family == "portable"  # type: ignore[arg-type]


def test_a_call_may_ask_for_hopper_where_it_is_not_the_default() -> None:
    assert forward(prefers_hopper=False, family="hopper").family == "hopper"
    assert forward(variant="window", family="hopper").family == "hopper"
    assert forward(mode="packed", family="hopper") == HopperTile(128, 128, 8, 2)
    assert forward(head_dims=(64, 64), family="hopper") == HopperTile(128, 128, 8, 3)
    own = {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 4}}
    assert forward(config=own, family="hopper") == HopperTile(128, 64, 8, 4)
    assert forward(config=own, family="hopper").family == "hopper"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"arch": "sm_100"}, "its kernels run on sm_90, not on sm_100"),
        ({"dtype": "float32"}, "float16 and bfloat16, not float32"),
        ({"mode": "segmented"}, "causal has no kernel of it for segmented calls"),
        ({"head_dims": (80, 80)}, "less than three quarters"),
        ({"length": 0}, "at least one key"),
    ],
    ids=str,
)
def test_where_hopper_cannot_run_what_asks_for_it_says_why(call: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        forward(family="hopper", **call)  # type: ignore[arg-type]


def test_a_tile_of_other_rows_is_refused() -> None:
    own = {"fwd": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}}
    with pytest.raises(ArgumentError, match=r"config\['fwd'\]: expected block_m 128 and num_warps 8"):
        forward(config=own, family="hopper")


def test_a_family_nobody_knows_is_refused() -> None:
    with pytest.raises(ArgumentError, match="family: expected None or one of 'portable', 'hopper', got 'volta'"):
        config_text("causal", None, "volta")


def test_narrow_masks_are_no_long_runs() -> None:
    for variant in ("causal", "full", "alibi", "forgetting", "softcap", "prefix_lm", "padding", "relative_bias"):
        assert is_faster(variant, "dense", (128, 128)), variant
        assert not is_faster(variant, "packed", (128, 128)), variant
    for variant in ("window", "gpt_oss", "natten", "document", "streaming_llm", "gemma2_local"):
        assert not is_faster(variant, "dense", (128, 128)), variant
        assert isinstance(hopper_tile(variant, "dense", "sm_90", "bfloat16", (128, 128), LENGTH), HopperTile)
