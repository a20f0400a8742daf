"""Head dims above 256, as in Gemma 4's global layers: portable kernels, tiles in two parts of at most 256 columns.

`hopper/test_hopper_wide_emulated.py` and `hopper/test_hopper_split_emulated.py` test Hopper's kernels for them.
"""

from __future__ import annotations

import pytest
import torch

from generated._runtime.archs import HOPPER_FAMILY
from generated._runtime.core import configs
from generated._runtime.core.checks import ArgumentError
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


def tiles(dtype: str, head_dims: tuple[int, int], arch: str = "sm_90", variant: str = "causal") -> configs.Tiles:
    return configs.tiles_for(variant, "dense", arch, "", dtype, head_dims, (4, 2), 64)


@pytest.mark.parametrize("head_dims", DIM_PAIRS)
def test_hopper_serves_wide_heads_of_every_length(head_dims: tuple[int, int]) -> None:
    found = tiles("bfloat16", head_dims)
    assert found["fwd"] == HOPPER_FAMILY.wide_forward_tile
    assert {name: found[name] for name in ("dkdv", "dq")} == HOPPER_FAMILY.split_tiles


@pytest.mark.parametrize("variant", ["softcap", "forgetting", "causal_dropout", "relative_bias"])
def test_the_backward_of_other_scores_is_portable(variant: str) -> None:
    families = {name: tile.family for name, tile in tiles("bfloat16", (512, 512), variant=variant).items()}
    assert families == {"fwd": HOPPER, "dkdv": PORTABLE, "dq": PORTABLE}


@pytest.mark.parametrize(
    ("dtype", "head_dims", "forward"),
    [("float32", (512, 512), PORTABLE), ("bfloat16", (512, 64), PORTABLE), ("bfloat16", (64, 512), HOPPER)],
)
def test_two_warpgroups_share_no_narrow_head(dtype: str, head_dims: tuple[int, int], forward: str) -> None:
    families = {name: tile.family for name, tile in tiles(dtype, head_dims).items()}
    assert families == {"fwd": forward, "dkdv": PORTABLE, "dq": PORTABLE}


def test_asking_for_hopper_with_narrow_values_beside_wide_keys_is_one_error() -> None:
    message = (
        "causal: family: expected one that can run this call, got 'hopper': "
        "beside a head_dim above 256 it needs another one of at least 65, not 64"
    )
    with pytest.raises(ArgumentError, match=message):
        configs.tiles_for("causal", "dense", "sm_90", "", "bfloat16", (512, 64), (1, 1), 64, CallOptions(family=HOPPER))


def test_own_tiles_of_wide_heads() -> None:
    """A call may change the stages, and keeps the tile of the other pass."""
    own = (("fwd", configs.Tile(64, 32, 8, 1)), ("dkdv", configs.Tile(32, 64, 8, 1)))
    options = CallOptions(family=HOPPER, tiles=own)
    found = configs.tiles_for("causal", "dense", "sm_90", "", "bfloat16", (512, 512), (1, 1), 64, options)
    assert [tile.num_stages for tile in (found["fwd"], found["dkdv"], found["dq"])] == [1, 1, 2]
    for name, tile, wanted in (
        ("fwd", configs.Tile(128, 32, 8, 2), "block_m 64, block_n up to 128 and num_warps 8"),
        ("dkdv", configs.Tile(64, 64, 8, 2), "block_m 32, block_n 64 and num_warps 8"),
    ):
        options = CallOptions(family=HOPPER, tiles=((name, tile),))
        with pytest.raises(ArgumentError, match=f"expected {wanted} in the family 'hopper'"):
            configs.tiles_for("causal", "dense", "sm_90", "", "bfloat16", (512, 512), (1, 1), 64, options)


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
