"""Head dims above 256, as in Gemma 4's global layers: portable kernels, tiles in two parts of at most 256 columns."""

from __future__ import annotations

import pytest
import torch

from generated._runtime.core import configs
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.families import refusal
from generated._runtime.core.options import CallOptions
from generated._runtime.core.tiles import HOPPER, PORTABLE
from tests.support.cases import DTYPES, VARIANTS, Shape, draw, with_frameworks
from tests.support.cases import tiles as both_blocks
from tests.support.judge import check_call
from tests.support.packings import Packing, draw_packed

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

# Head dims of q and k, and of v: full parts, a narrow or incomplete second part, odd rows, and only one wide side.
DIM_PAIRS = [(512, 512), (320, 320), (512, 256), (300, 300), (128, 512), (448, 264)]
PACKING = Packing.of(5, 20)
IDS = [[0] * 12 + [1] * 8]
LENGTH = 20
SMALL_TILES = both_blocks(16, 16)


def dims_of(variant: str) -> tuple[int, int]:
    """One pair for each variant, in turn."""
    return DIM_PAIRS[VARIANTS.index(variant) % len(DIM_PAIRS)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str) -> None:
    dim, dim_v = dims_of(variant)
    dtype = (torch.bfloat16, torch.float32)[VARIANTS.index(variant) % 2]
    check_call(variant, draw(variant, Shape(q_len=LENGTH, dim=dim, dim_v=dim_v), dtype), config=SMALL_TILES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), [(512, 512), (257, 257), (192, 128), (256, 128)])
def test_head_dims(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    """With the interpreter's default tiles."""
    check_call("causal", draw("causal", Shape(q_len=33, kv_len=40, dim=dim, dim_v=dim_v), dtype))


@with_frameworks
@pytest.mark.parametrize("variant", ["causal", "forgetting", "gpt_oss"])
@pytest.mark.covers(mode="packed")
def test_packed(variant: str, framework: str) -> None:
    inputs = draw_packed(variant, PACKING, DTYPES[0], group=2, dim=512, dim_v=320)
    check_call(variant, inputs, config=SMALL_TILES, framework=framework, **PACKING.options())


@with_frameworks
@pytest.mark.parametrize("variant", ["causal", "alibi"])
@pytest.mark.covers(mode="segmented")
def test_segmented(variant: str, framework: str) -> None:
    inputs = draw(variant, Shape(q_len=LENGTH, dim=320, dim_v=512), DTYPES[0])
    ids = torch.tensor(IDS, dtype=torch.int32, device=inputs.q.device)
    check_call(variant, inputs, config=SMALL_TILES, framework=framework, q_segment_ids=ids)


@pytest.mark.parametrize("variant", ["causal", "relative_bias"])
@pytest.mark.covers(framework="jax")
def test_dense_in_jax(variant: str) -> None:
    inputs = draw(variant, Shape(q_len=LENGTH, dim=512), DTYPES[0])
    check_call(variant, inputs, config=SMALL_TILES, framework="jax")


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "dim_v"), DIM_PAIRS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_long_on_a_gpu(variant: str, dim: int, dim_v: int) -> None:
    check_call(variant, draw(variant, Shape(q_len=1000, dim=dim, dim_v=dim_v), torch.bfloat16))


# ----------------------------------------------------------------------------------------------------------- decisions


def tiles(dtype: str, head_dims: tuple[int, int], arch: str = "sm_90") -> configs.Tiles:
    return configs.tiles_for("causal", "dense", arch, "", dtype, head_dims, (4, 2), 8192)


@pytest.mark.parametrize("head_dims", DIM_PAIRS)
def test_hopper_leaves_wide_heads_to_the_portable_family(head_dims: tuple[int, int]) -> None:
    reason = refusal("sm_90", "bfloat16", head_dims, 8192)
    assert "its tiles hold a head_dim of at most 256" in reason or "need a head_dim of at least" in reason
    assert {tile.family for tile in tiles("bfloat16", head_dims).values()} == {PORTABLE}


def test_asking_for_hopper_with_wide_heads_is_one_error() -> None:
    message = (
        "causal: family: expected one that can run this call, got 'hopper': its tiles hold a head_dim of at most 256"
    )
    with pytest.raises(ArgumentError, match=message):
        configs.tiles_for(
            "causal", "dense", "sm_90", "", "bfloat16", (512, 512), (1, 1), 64, CallOptions(family=HOPPER)
        )


def test_a_chip_without_room_for_a_float32_tile_is_one_error() -> None:
    assert tiles("bfloat16", (512, 512), "sm_89")
    assert tiles("float32", (320, 320), "sm_89")
    message = "expected a head_dim of at most 320 in float32 on sm_89, whose shared memory holds no tile .*, got 512"
    with pytest.raises(ArgumentError, match=message):
        tiles("float32", (512, 512), "sm_89")


def test_wide_heads_have_two_parts_and_leave_narrow_tiles_alone() -> None:
    assert [configs.block_columns(n) for n in (256, 257, 384, 512)] == [256] * 4
    assert configs.block_columns(576) == 512, "keys of latent attention, on paged caches alone"
    assert tiles("bfloat16", (256, 256))["dq"] != tiles("bfloat16", (512, 512))["dq"]
