"""What a call may request of its kernels: a family, tiles, a fixed order; and the errors if it cannot have them."""

from __future__ import annotations

import pytest
import torch

from generated._runtime.archs import HOPPER_FAMILY as FAMILY
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.configs import Tile
from generated._runtime.core.families import HopperTile
from generated._runtime.core.options import NO_OPTIONS, checked_options
from generated._runtime.torch.devices import call_options
from tests.support.family_choices import backward, families, forward


def test_a_fixed_order_takes_a_portable_dq() -> None:
    assert families(deterministic=True) == ["hopper", "portable"]
    assert families(deterministic=True, family="hopper") == ["hopper", "portable"]
    assert families(deterministic=False) == ["hopper", "hopper"]
    assert families("forgetting") == ["hopper", "hopper"]
    assert families("forgetting", deterministic=True) == ["hopper", "portable"]
    assert families("relative_bias") == ["hopper", "hopper"]
    assert families("relative_bias", deterministic=True) == ["hopper", "portable"]


OWN = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


def test_a_tile_of_a_call_is_a_portable_one() -> None:
    assert families(config={"dq": OWN}) == ["portable", "portable"]
    assert families(config={"dkdv": OWN}) == ["portable", "portable"]
    assert families(config={"dq": OWN}, family="hopper") == ["hopper", "portable"]
    assert backward(config={"dq": OWN}, family="hopper")[1] == Tile(64, 64, 4, 2)


def test_atomics_refuse_a_fixed_order() -> None:
    assert checked_options("relative_bias", None, None, True).fixed_order
    for mode in ("packed", "segmented"):
        wanted = f"expected None or False, as {mode} calls add one of its gradients with atomics, in any order"
        with pytest.raises(ArgumentError, match=f"deterministic: {wanted}"):
            checked_options("relative_bias", None, None, True, mode)


def test_deterministic_is_a_bool() -> None:
    with pytest.raises(ArgumentError, match="deterministic: expected None, True or False, got 1"):
        checked_options("causal", None, None, 1)


def test_torch_decides_about_the_order_where_a_call_does_not() -> None:
    assert call_options("causal", None, None, None) == NO_OPTIONS
    torch.use_deterministic_algorithms(True)
    try:
        assert call_options("causal", None, None, None) == checked_options("causal", None, None, True)
        assert call_options("causal", None, None, False) == NO_OPTIONS
        assert call_options("relative_bias", None, None, None).fixed_order
        assert call_options("relative_bias", None, None, None, "packed") == NO_OPTIONS
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_tile_of_other_keys_is_refused_in_the_backward() -> None:
    own = {"dkdv": {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2}}
    with pytest.raises(ArgumentError, match=r"config\['dkdv'\]: expected block_m 64 or 128, block_n 128"):
        backward(config=own, family="hopper")
    assert backward(head_dims=(256, 256), config=own, family="hopper")[0] == HopperTile(**own["dkdv"])
    own["dkdv"]["block_m"] = 128
    with pytest.raises(ArgumentError, match=r"config\['dkdv'\]: expected block_m 64, block_n 64"):
        backward(head_dims=(256, 256), config=own, family="hopper")


def test_a_call_may_ask_for_hopper_where_it_is_not_the_default() -> None:
    assert forward(variant="window", family="hopper").family == "hopper"
    short = FAMILY.narrow_forward_from // 2
    assert forward(head_dims=(64, 64), length=short, family="hopper") == FAMILY.forward_tiles[64]
    own = {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 4}}
    assert forward(config=own, family="hopper") == HopperTile(**own["fwd"])
    assert forward(config=own, family="hopper").family == "hopper"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"arch": "sm_100"}, "its kernels run on sm_90, not on sm_100"),
        ({"dtype": "float32"}, "float16 and bfloat16, not float32"),
        ({"head_dims": (32, 32)}, "tiles of 64 columns need a head_dim of at least 33, not 32"),
        ({"length": 0}, "at least one key"),
    ],
    ids=str,
)
def test_a_call_that_asks_for_hopper_is_refused_with_the_reason(call: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        forward(family="hopper", **call)  # type: ignore[arg-type]


@pytest.mark.parametrize(("block_m", "block_n", "num_warps"), [(64, 64, 4), (128, 64, 4), (128, 256, 8)])
def test_a_tile_that_the_forward_cannot_run_is_refused(block_m: int, block_n: int, num_warps: int) -> None:
    """A thread's part of a row of more than 128 keys would not fit its word of mask bits."""
    own = {"fwd": {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": 2}}
    expected = rf"config\['fwd'\]: expected block_m 128, block_n up to 128 and num_warps 8 .*, got {block_m}, {block_n}"
    with pytest.raises(ArgumentError, match=expected):
        forward(config=own, family="hopper")


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ArgumentError, match="family: expected None or one of 'portable', 'hopper', got 'volta'"):
        checked_options("causal", None, "volta")
