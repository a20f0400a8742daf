"""Which family of kernels a call runs in: what Hopper's serves, what a call may ask for, what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.load.spec_file import load
from codegen.plan.traits import keys_start_at_zero, rows_are_alike
from codegen.plan.variant import plan
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.configs import Tile, tiles_for
from generated._runtime.core.families import HopperTile, hopper_tile, is_faster
from generated._runtime.core.options import NO_OPTIONS, checked_options
from generated._runtime.torch.support import call_options
from tests.support.paths import LIBRARY

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
) -> Tile:
    options = checked_options(variant, config, family)
    return tiles_for(variant, mode, arch, "", dtype, head_dims, (8, 2), length, options)["fwd"]


def backward(
    variant: str = "causal",
    mode: str = "dense",
    head_dims: tuple[int, int] = (128, 128),
    length: int = LENGTH,
    config: object = None,
    family: str | None = None,
    deterministic: bool | None = None,
) -> tuple[Tile, Tile]:
    """The tiles of dkdv and dq."""
    options = checked_options(variant, config, family, deterministic)
    tiles = tiles_for(variant, mode, "sm_90", "", "bfloat16", head_dims, (8, 2), length, options)
    return tiles["dkdv"], tiles["dq"]


def families(*args: Any, **options: Any) -> list[str]:
    return [tile.family for tile in backward(*args, **options)]


def test_backwards_of_long_runs_are_one_kernel() -> None:
    assert backward() == (HopperTile(64, 128, 8, 2),) * 2
    assert backward(head_dims=(64, 64)) == (HopperTile(128, 128, 8, 2),) * 2
    for variant in ("softcap", "causal_dropout"):
        assert backward(variant, head_dims=(64, 64)) == (HopperTile(64, 128, 8, 2),) * 2
    assert families() == ["hopper", "hopper"]
    for head_dims in ((256, 256), (64, 256)):
        assert backward(head_dims=head_dims) == (HopperTile(64, 64, 8, 2),) * 2
    assert families(family="portable") == ["portable", "portable"]


def test_backwards_of_bands_and_ranges_too() -> None:
    for variant in ("window", "streaming_llm", "gemma2_local", "document"):
        for head_dims in ((64, 64), (128, 128), (256, 256)):
            assert families(variant, head_dims=head_dims) == ["hopper", "hopper"], variant
        assert families(variant, mode="packed") == ["portable", "portable"]


def test_other_backwards_are_so_where_a_call_asks() -> None:
    # gpt_oss sees 128 keys.
    for variant in ("gpt_oss", "natten"):
        assert families(variant) == ["portable", "portable"]
        assert families(variant, family="hopper") == ["hopper", "hopper"]


def test_of_short_sequences_dq_has_a_kernel_of_its_own() -> None:
    assert families(length=512) == ["hopper", "portable"]
    assert families(head_dims=(64, 64), length=1024) == ["hopper", "portable"]
    assert families(length=512, family="hopper") == ["hopper", "hopper"]


def test_backwards_whose_columns_are_mostly_padding_are_portable() -> None:
    assert families(head_dims=(192, 128)) == ["portable", "portable"]
    assert families(head_dims=(192, 128), family="hopper") == ["hopper", "hopper"]


def test_a_fixed_order_takes_a_portable_dq() -> None:
    assert families(deterministic=True) == ["hopper", "portable"]
    assert families(deterministic=True, family="hopper") == ["hopper", "portable"]
    assert families(deterministic=False) == ["hopper", "hopper"]
    assert families("forgetting") == ["hopper", "hopper"]
    assert families("forgetting", deterministic=True) == families("relative_bias") == ["hopper", "portable"]


OWN = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


def test_a_tile_of_a_call_is_a_portable_one() -> None:
    assert families(config={"dq": OWN}) == ["portable", "portable"]
    assert families(config={"dkdv": OWN}) == ["portable", "portable"]
    assert families(config={"dq": OWN}, family="hopper") == ["hopper", "portable"]
    assert backward(config={"dq": OWN}, family="hopper")[1] == Tile(64, 64, 4, 2)


def test_what_is_added_with_atomics_has_no_fixed_order() -> None:
    with pytest.raises(ArgumentError, match=r"deterministic: expected None or False, .* with atomics, in any order"):
        checked_options("relative_bias", None, None, True)


def test_an_order_is_asked_for_by_a_bool() -> None:
    with pytest.raises(ArgumentError, match="deterministic: expected None, True or False, got 1"):
        checked_options("causal", None, None, 1)


def test_torch_decides_where_a_call_does_not() -> None:
    assert call_options("causal", None, None, None) == NO_OPTIONS
    torch.use_deterministic_algorithms(True)
    try:
        assert call_options("causal", None, None, None) == checked_options("causal", None, None, True)
        assert call_options("causal", None, None, False) == NO_OPTIONS
        assert call_options("relative_bias", None, None, None) == NO_OPTIONS
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_tile_of_other_keys_is_refused_in_the_backward() -> None:
    own = {"dkdv": {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2}}
    with pytest.raises(ArgumentError, match=r"config\['dkdv'\]: expected block_m 64 or 128, block_n 128"):
        backward(config=own, family="hopper")
    assert backward(head_dims=(256, 256), config=own, family="hopper")[0] == HopperTile(64, 64, 8, 2)
    own["dkdv"]["block_m"] = 128
    with pytest.raises(ArgumentError, match=r"config\['dkdv'\]: expected block_m 64, block_n 64"):
        backward(head_dims=(256, 256), config=own, family="hopper")


def test_long_runs_of_wide_tiles_run_on_hopper() -> None:
    assert forward() == HopperTile(128, 128, 8, 2)
    assert forward().family == "hopper"
    assert forward(head_dims=(192, 128)).family == "hopper"
    assert forward(dtype="float16").family == "hopper"
    assert forward("causal_dropout").family == "hopper"


def test_long_sequences_of_narrow_tiles_too() -> None:
    assert forward(head_dims=(64, 64), length=8192) == HopperTile(192, 128, 12, 2)
    assert forward(head_dims=(64, 64), length=1024) == HopperTile(128, 128, 8, 3)
    assert forward(head_dims=(64, 64), length=1023).family == "portable"
    # Where all rows see the same keys, from fewer on.
    assert forward(variant="full", head_dims=(64, 64), length=2048) == HopperTile(192, 128, 12, 2)
    assert forward(variant="full", head_dims=(64, 64), length=512) == HopperTile(128, 128, 8, 3)
    assert forward(variant="full", head_dims=(64, 64), length=511).family == "portable"
    assert forward(variant="alibi", head_dims=(64, 64), length=8192) == HopperTile(128, 128, 8, 3)
    for variant in ("window", "softcap", "forgetting", "relative_bias", "causal_dropout"):
        assert forward(variant=variant, head_dims=(64, 64), length=8192).family == "portable"
    for variant in ("document", "causal_dropout"):
        assert forward(variant=variant, head_dims=(64, 64), length=8192, family="hopper").block_m == 128


def test_rows_under_a_mask_are_not_alike() -> None:
    """Though they visit every block, as under masks from a tensor."""
    library = load(LIBRARY).variants
    for name in ("tensor_mask", "block_sparse"):
        planned = plan(library[name])
        assert keys_start_at_zero(planned)
        assert not rows_are_alike(planned)


def test_packed_calls_run_on_hopper() -> None:
    assert forward(mode="packed") == HopperTile(128, 128, 8, 2)
    assert families(mode="packed") == ["hopper", "hopper"]
    # Of shorter sequences, where they ask.
    assert forward(mode="packed", length=1023).family == "portable"
    assert families(mode="packed", length=1023) == ["portable", "portable"]
    assert forward(mode="packed", length=1023, family="hopper") == HopperTile(128, 128, 8, 2)
    assert forward("window", "packed", family="hopper").family == "hopper"
    assert families(mode="packed", family="hopper") == ["hopper", "hopper"]
    assert families(mode="packed", family="hopper", deterministic=True) == ["hopper", "portable"]
    # The tile of long sequences is that of dense calls alone.
    assert forward(mode="packed", head_dims=(64, 64), length=8192, family="hopper") == HopperTile(128, 128, 8, 3)


def test_packed_backwards_of_wide_columns_too() -> None:
    for head_dims in ((256, 256), (64, 256), (192, 128)):
        assert forward(mode="packed", head_dims=head_dims, family="hopper").family == "hopper"
        assert families(mode="packed", head_dims=head_dims, family="hopper") == ["hopper", "hopper"]
        assert backward(mode="packed", head_dims=head_dims, family="hopper")[0] == HopperTile(64, 64, 8, 2)


def test_segmented_calls_run_on_hopper() -> None:
    """As documents do: forward at more than 64 columns, and at 64 where scores are products; backward at any."""
    for variant in ("full", "causal", "window", "document", "alibi", "forgetting"):
        for head_dims in ((128, 128), (256, 256)):
            assert forward(variant, "segmented", head_dims=head_dims).family == "hopper", variant
            assert families(variant, "segmented", head_dims) == ["hopper", "hopper"], variant
        assert families(variant, "segmented", (64, 64)) == ["hopper", "hopper"], variant
    for variant, family in (("causal", "hopper"), ("full", "hopper"), ("window", "portable"), ("alibi", "portable")):
        assert forward(variant, "segmented", head_dims=(64, 64)).family == family, variant
    assert families("relative_bias", "segmented") == ["hopper", "portable"]
    # The tile of long sequences is that of dense calls alone.
    tile = forward(mode="segmented", head_dims=(64, 64), length=8192, family="hopper")
    assert tile == HopperTile(128, 128, 8, 3)
    # One sees 128 keys, the blocks of the others are those of a list.
    assert families("gpt_oss", "segmented") == ["portable", "portable"]
    for variant in ("streaming_llm", "natten"):
        assert forward(variant, "segmented").family == "portable"
        assert forward(variant, "segmented", family="hopper").family == "hopper"
        assert families(variant, "segmented") == ["portable", "portable"]
        assert families(variant, "segmented", family="hopper") == ["hopper", "hopper"]


@pytest.mark.parametrize(
    "call",
    [
        {"family": "portable"},
        {"config": {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}}},
        {"arch": "sm_80"},
        {"dtype": "float32"},
        {"mode": "segmented", "head_dims": (64, 64), "variant": "alibi"},
        {"mode": "segmented", "variant": "streaming_llm"},
        {"head_dims": (80, 80)},
        {"length": 0},
        {"variant": "natten"},
        {"head_dims": (64, 64), "length": 1023},
    ],
    ids=str,
)
def test_all_else_runs_on_the_portable_family(call: dict[str, object]) -> None:
    assert forward(**call).family == "portable"  # type: ignore[arg-type]


def test_a_call_may_ask_for_hopper_where_it_is_not_the_default() -> None:
    assert forward(variant="window", family="hopper").family == "hopper"
    assert forward(head_dims=(64, 64), length=512, family="hopper") == HopperTile(128, 128, 8, 3)
    own = {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 4}}
    assert forward(config=own, family="hopper") == HopperTile(128, 64, 8, 4)
    assert forward(config=own, family="hopper").family == "hopper"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"arch": "sm_100"}, "its kernels run on sm_90, not on sm_100"),
        ({"dtype": "float32"}, "float16 and bfloat16, not float32"),
        ({"head_dims": (80, 80)}, "tiles of 128 columns need a head_dim of at least 96, not 80"),
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
        checked_options("causal", None, "volta")


def test_narrow_masks_are_no_long_runs() -> None:
    for variant in ("causal", "full", "alibi", "forgetting", "softcap", "prefix_lm", "padding", "relative_bias"):
        assert is_faster(variant, "dense", (128, 128), LENGTH), variant
        assert is_faster(variant, "dense", (256, 256), LENGTH), variant
    for variant in ("window", "gpt_oss", "document", "streaming_llm", "gemma2_local"):
        assert is_faster(variant, "dense", (128, 128), LENGTH), variant
        assert not is_faster(variant, "packed", (128, 128), LENGTH), variant
        assert is_faster(variant, "dense", (256, 256), LENGTH), variant
        assert not is_faster(variant, "dense", (64, 64), LENGTH), variant
    for head_dims in ((64, 64), (128, 128), (256, 256)):
        assert not is_faster("natten", "dense", head_dims, LENGTH)
    for variant in ("window", "gpt_oss", "natten", "document", "streaming_llm", "gemma2_local"):
        assert isinstance(hopper_tile(variant, "dense", "sm_90", "bfloat16", (128, 128), LENGTH), HopperTile)
