"""Which family of kernels a call runs in: properties of the choice against the table of tiles and lengths.

No test restates a number of the table: a new measurement changes only the table.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from codegen.load.spec_file import load
from codegen.plan.traits import keys_start_at_zero, rows_are_alike
from codegen.plan.variant import plan
from generated._runtime.archs import HOPPER_FAMILY as FAMILY
from generated._runtime.core.families import LEAST_TILE, WHOLE_RUN, HopperTile, hopper_tile, is_faster
from generated._runtime.kernels import TRAITS
from tests.support.family_choices import LENGTH, backward, families, forward
from tests.support.paths import LIBRARY

MODES = ("dense", "packed", "segmented")
WIDTHS = tuple(FAMILY.forward_tiles)
"""Columns of tiles; a head_dim of this size fills the tile."""

BOUNDARIES = {
    *(FAMILY.long_forward_from, FAMILY.long_forward_from_if_alike),
    *(FAMILY.narrow_forward_from, FAMILY.narrow_forward_from_if_alike),
    *FAMILY.packed_forward_from.values(),
    *FAMILY.fused_backward_from.values(),
    *FAMILY.packed_fused_backward_from.values(),
    FAMILY.mixed_backward_from,
}
LENGTHS = sorted({1, LENGTH, 2 * max(BOUNDARIES)} | {n - below for n in BOUNDARIES for below in (0, 1)})
"""Both sides of every length that the table names."""

with_variants = pytest.mark.parametrize("variant", TRAITS)
with_modes = pytest.mark.parametrize("mode", MODES)


def square(columns: int) -> tuple[int, int]:
    return columns, columns


def forwards_run_on_hopper(variant: str, columns: int) -> bool:
    """Whether packed and segmented forwards do that are not short."""
    traits = TRAITS[variant]
    return traits.keys_are_runs and (columns > 64 or traits.score_is_cheap or traits.score_is_overlapped)


@with_modes
@with_variants
def test_forward_tile_is_the_tables(variant: str, mode: str) -> None:
    """The tile of long calls serves dense calls of the narrowest tile whose products compute whole scores."""
    for columns, length in itertools.product(WIDTHS, LENGTHS):
        tile = forward(variant, mode, head_dims=square(columns), length=length, family="hopper")
        if tile == FAMILY.long_forward_tile:
            assert (mode, columns) == ("dense", min(WIDTHS))
            assert TRAITS[variant].score_is_scaled_product or TRAITS[variant].products_add_terms
            assert TRAITS[variant].keys_start_at_zero
            assert length >= FAMILY.long_forward_from_if_alike
        else:
            assert tile == FAMILY.forward_tiles[columns]


@with_modes
@with_variants
def test_backward_tile_is_the_tables_with_fewer_rows_for_scores(variant: str, mode: str) -> None:
    for columns in WIDTHS:
        tile, of_table = backward(variant, mode, square(columns), family="hopper")[0], FAMILY.backward_tiles[columns]
        rows = of_table.block_m
        has_all = TRAITS[variant].score_is_capped and mode == "dense"
        if not TRAITS[variant].score_is_scaled_product and not has_all:
            rows = min(rows, FAMILY.scored_rows)
        assert tile == of_table._replace(block_m=rows)


@with_modes
@with_variants
def test_longer_sequences_stay_on_hopper(variant: str, mode: str) -> None:
    """A family may change with the length once, from the portable one to Hopper's, at a length of the table."""
    for columns in WIDTHS:
        chosen = {n: forward(variant, mode, head_dims=square(columns), length=n).family for n in LENGTHS}
        for before, after in itertools.pairwise(LENGTHS):
            if chosen[before] != chosen[after]:
                assert chosen[after] == "hopper"
                assert after in BOUNDARIES
        for which in (0, 1):
            found = [families(variant, mode, square(columns), length=n)[which] for n in LENGTHS]
            assert found == sorted(found, reverse=True), "portable, then hopper"


def test_sequences_alike_are_long_earlier() -> None:
    """Without a mask no tile is cut: `full` takes Hopper's family and the tile of long calls at no greater lengths."""
    assert FAMILY.narrow_forward_from_if_alike <= FAMILY.narrow_forward_from
    assert FAMILY.long_forward_from_if_alike <= FAMILY.long_forward_from
    assert TRAITS["full"].rows_are_alike
    assert not TRAITS["causal"].rows_are_alike
    for of_table, tile in (
        (FAMILY.narrow_forward_from_if_alike, FAMILY.forward_tiles[64]),
        (FAMILY.long_forward_from_if_alike, FAMILY.long_forward_tile),
    ):
        assert forward("full", head_dims=(64, 64), length=of_table) == tile
        assert forward("full", head_dims=(64, 64), length=of_table - 1) != tile
        assert forward("causal", head_dims=(64, 64), length=of_table) != tile


def test_forwards_have_more_keys_a_tile_if_columns_are_not_stored() -> None:
    assert (
        forward("causal", head_dims=(192, 128)) == forward("causal", head_dims=(129, 33)) == FAMILY.mixed_forward_tile
    )
    for head_dims in ((193, 128), (192, 129), (128, 192), (192, 192)):
        assert forward("causal", head_dims=head_dims) == FAMILY.forward_tiles[256]


def test_forwards_whose_products_add_terms_have_the_tiles_of_plain_ones_if_shared_memory_suffices() -> None:
    assert forward("forgetting", head_dims=(192, 128)) == FAMILY.forward_tiles[256]
    assert forward("forgetting", head_dims=(64, 64), length=FAMILY.long_forward_from) == FAMILY.long_forward_tile
    assert forward("forgetting", head_dims=(64, 64), length=FAMILY.long_forward_from - 1) == FAMILY.forward_tiles[64]


def test_backward_of_long_key_ranges_is_one_kernel() -> None:
    for columns in WIDTHS:
        assert families(head_dims=square(columns)) == ["hopper", "hopper"]
    assert families(family="portable") == ["portable", "portable"]


def test_backwards_of_bands_and_ranges_run_on_hopper() -> None:
    for variant in ("window", "streaming_llm", "gemma2_local", "document"):
        for head_dims in ((64, 64), (128, 128), (256, 256)):
            for mode in MODES:
                found = families(variant, mode=mode, head_dims=head_dims, band_keys=4096)
                assert found == ["hopper", "hopper"], (variant, mode)
    for variant, mode in itertools.product(("window", "streaming_llm", "gpt_oss"), MODES):
        assert families(variant, mode=mode, band_keys=128) == ["hopper", "portable"], (variant, mode)


def test_keys_of_a_band_count_as_a_causal_sequence_of_twice_the_length() -> None:
    """The width counts that the call gives, or else the example's; it counts no more than the sequence's length."""
    for columns, fused_from in FAMILY.fused_backward_from.items():
        for keys, kernels in ((fused_from // 2, "hopper"), (fused_from // 2 - 1, "portable")):
            for variant in ("window", "streaming_llm"):
                assert families(variant, head_dims=square(columns), band_keys=keys) == ["hopper", kernels]
            assert families("causal", head_dims=square(columns), length=2 * keys) == ["hopper", kernels]
        of_example = families("window", head_dims=square(columns))
        assert of_example == families("window", head_dims=square(columns), band_keys=TRAITS["window"].band_keys)
        short = families("window", head_dims=square(columns), length=fused_from - 1, band_keys=4096)
        assert short == ["hopper", "portable"]
    assert (TRAITS["gpt_oss"].band_keys, TRAITS["gemma2_local"].band_keys) == (128, 4096)
    assert TRAITS["causal"].band_keys is TRAITS["document"].band_keys is TRAITS["prefix_lm"].band_keys is None
    narrow = FAMILY.narrow_forward_from // 2
    for keys, family in ((narrow, "hopper"), (narrow - 1, "portable")):
        assert forward("window", head_dims=(64, 64), band_keys=keys).family == family


def test_backwards_of_lists_run_on_hopper_at_128_columns_or_where_a_call_asks() -> None:
    assert families("natten", head_dims=(64, 64)) == ["portable", "portable"]
    assert families("natten", head_dims=(64, 64), family="hopper") == ["hopper", "hopper"]
    assert families("natten", head_dims=(128, 128)) == ["hopper", "hopper"]


def test_blocks_as_long_as_tiles_run_on_hopper() -> None:
    """A grid's runs are blocks that no tile lies across, if a power of two that long divides them."""
    for columns in (64, 128):
        assert forward("natten", head_dims=square(columns)).family == "portable"
        assert forward("natten", head_dims=square(columns), run_unit=WHOLE_RUN).family == "hopper"
        assert families("natten", head_dims=square(columns), run_unit=WHOLE_RUN) == ["hopper", "hopper"]
        assert families("natten", head_dims=square(columns), run_unit=WHOLE_RUN // 2) == ["portable", "portable"]


@pytest.mark.parametrize("columns", WIDTHS)
def test_tiles_lie_inside_of_runs(columns: int) -> None:
    dims = square(columns)
    usual = forward("natten", head_dims=dims, family="portable")
    untouched = {usual, *backward("natten", head_dims=dims, family="portable")}
    for unit in (LEAST_TILE, 64):
        dkdv, dq = backward("natten", head_dims=dims, run_unit=unit)
        fwd = forward("natten", head_dims=dims, run_unit=unit)
        for tile, shared_by_warps in ((fwd, fwd.block_m), (dkdv, dkdv.block_n), (dq, dq.block_m)):
            assert max(tile.block_m, tile.block_n) <= unit
            assert tile in untouched or 16 * tile.num_warps <= shared_by_warps
    shorter = LEAST_TILE // 2
    assert forward("natten", head_dims=dims, run_unit=shorter, family="portable") == usual
    own = {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}}
    assert forward("natten", head_dims=dims, run_unit=LEAST_TILE, config=own)[:2] == (128, 64)


def test_cut_tiles_have_the_sides_and_stages_that_were_fastest() -> None:
    def cut(columns: int) -> list[tuple[int, ...]]:
        asked: dict[str, Any] = {"head_dims": square(columns), "run_unit": 64, "family": "portable"}
        return [tuple(tile) for tile in (forward("causal", **asked), *backward("causal", **asked))]

    assert cut(64) == [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3)]
    assert cut(128) == [(64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2)]
    assert cut(256) == [(64, 32, 4, 2), (32, 64, 8, 3), (64, 32, 4, 2)]


@with_modes
@pytest.mark.parametrize("variant", ["causal", "alibi"])
def test_dq_of_short_sequences_has_a_kernel_of_its_own(variant: str, mode: str) -> None:
    from_length = FAMILY.fused_backward_from if mode == "dense" else FAMILY.packed_fused_backward_from
    for columns, length in from_length.items():
        asked = partial(families, variant, mode=mode, head_dims=square(columns))
        assert asked(length=length) == ["hopper", "hopper"]
        for short in (1, length - 1):
            assert asked(length=short) == ["hopper", "portable"]
            assert asked(length=short, family="hopper") == ["hopper", "hopper"]


def test_short_backwards_with_far_more_columns_in_k_than_in_v_are_portable() -> None:
    for mode, first in itertools.product(("dense", "packed"), (144, 192)):
        asked = partial(families, mode=mode, length=FAMILY.mixed_backward_from - 1)
        assert asked(head_dims=(first, 128)) == asked(head_dims=(128, first)) == ["portable", "portable"]
        assert asked(head_dims=(first, 128), family="hopper") == ["hopper", "hopper"]
        for other in ((first, first), (256, 128), (128, 128)):
            assert asked(head_dims=other)[0] == "hopper"
    assert families(head_dims=(192, 128), length=FAMILY.mixed_backward_from) == ["hopper", "hopper"]


def test_wide_forwards_run_on_hopper() -> None:
    assert forward().family == "hopper"
    assert forward(head_dims=(192, 128)).family == "hopper"
    assert forward(dtype="float16").family == "hopper"
    assert forward("causal_dropout").family == "hopper"


def test_narrow_forwards_run_on_hopper_where_the_score_is_cheap_or_overlapped() -> None:
    for variant, traits in TRAITS.items():
        narrow = forward(variant, head_dims=(64, 64), length=2 * max(LENGTHS), band_keys=max(LENGTHS))
        suits = traits.score_is_cheap or traits.score_is_overlapped
        has_ranges = traits.keys_start_at_zero or traits.bands_are_bits
        assert (narrow.family == "hopper") == (suits and has_ranges), variant
    assert TRAITS["causal_dropout"].score_is_overlapped
    assert TRAITS["softcap"].score_is_overlapped
    assert forward("softcap", head_dims=(64, 64), length=1024).family == "portable"
    assert forward("softcap", head_dims=(64, 64), length=2048).family == "hopper"


def test_narrow_forwards_of_wide_bands_run_on_hopper() -> None:
    for variant in ("window", "streaming_llm", "gemma2_local", "band"):
        assert forward(variant, head_dims=(64, 64), band_keys=1024) == FAMILY.forward_tiles[64], variant
    # gpt_oss sees 128 keys, band_mask reads a tensor for each pair, and the ranges of document come from a table.
    for variant in ("gpt_oss", "band_mask", "document"):
        assert TRAITS[variant].bands_are_bits == (variant == "gpt_oss")
        assert forward(variant, head_dims=(64, 64), length=LENGTH).family == "portable", variant


def test_rows_under_a_mask_are_not_alike() -> None:
    """They are not alike even if they visit every block, as with masks that read a tensor for each pair."""
    planned = plan(load(LIBRARY).variants["tensor_mask"])
    assert keys_start_at_zero(planned)
    assert not rows_are_alike(planned)


def test_packed_calls_run_on_hopper() -> None:
    assert forward(mode="packed") == FAMILY.forward_tiles[128]
    assert families(mode="packed") == ["hopper", "hopper"]
    shortest = FAMILY.packed_forward_from[128]
    assert forward(mode="packed", length=shortest) == FAMILY.forward_tiles[128]
    assert forward(mode="packed", length=shortest - 1).family == "portable"
    assert forward(mode="packed", length=shortest - 1, family="hopper") == FAMILY.forward_tiles[128]
    assert families(mode="packed", family="hopper") == ["hopper", "hopper"]
    assert families(mode="packed", family="hopper", deterministic=True) == ["hopper", "portable"]


@with_variants
def test_packed_forwards_of_key_ranges_run_on_hopper(variant: str) -> None:
    """If neither the sequences nor their bands are short."""
    for columns, shortest in FAMILY.packed_forward_from.items():
        for length, family in ((shortest, "hopper"), (shortest - 1, "portable")):
            expected = family if forwards_run_on_hopper(variant, columns) else "portable"
            found = forward(variant, "packed", head_dims=square(columns), length=length, band_keys=shortest // 2)
            assert found.family == expected


def test_packed_calls_of_wide_columns_run_on_hopper_where_they_ask() -> None:
    for head_dims in ((256, 256), (64, 256), (192, 128)):
        assert forward(mode="packed", head_dims=head_dims, family="hopper").family == "hopper"
        assert families(mode="packed", head_dims=head_dims, family="hopper") == ["hopper", "hopper"]


@with_variants
def test_segmented_calls_of_key_ranges_run_on_hopper(variant: str) -> None:
    """Whatever describes the blocks of a segmented call: those of `streaming_llm` are listed."""
    traits = TRAITS[variant]
    for columns in WIDTHS:
        on_hopper = forwards_run_on_hopper(variant, columns)
        assert (forward(variant, "segmented", head_dims=square(columns)).family == "hopper") == on_hopper
        assert (families(variant, "segmented", square(columns))[0] == "hopper") == traits.keys_are_runs
        assert forward(variant, "segmented", head_dims=square(columns), family="hopper").family == "hopper"
        fused = "hopper" if "segmented" in traits.fused_modes else "portable"
        assert families(variant, "segmented", square(columns), family="hopper") == ["hopper", fused]


@pytest.mark.parametrize(
    "call",
    [
        {"family": "portable"},
        {"config": {"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}}},
        {"arch": "sm_80"},
        {"dtype": "float32"},
        {"mode": "segmented", "variant": "natten"},
        {"head_dims": (32, 32)},
        {"length": 0},
        {"variant": "natten"},
        {"head_dims": (64, 64), "length": FAMILY.narrow_forward_from - 1},
    ],
    ids=str,
)
def test_portable_family_runs_the_rest(call: dict[str, object]) -> None:
    assert forward(**call).family == "portable"  # type: ignore[arg-type]


def test_short_key_ranges_of_dense_calls_run_on_hopper_at_more_columns_or_in_wide_bands() -> None:
    for variant, traits in TRAITS.items():
        if traits.keys_start_at_zero:
            continue
        for columns in WIDTHS:
            suits_narrow = traits.bands_are_bits and (traits.score_is_cheap or traits.score_is_overlapped)
            expected = traits.keys_are_runs if columns > min(WIDTHS) else suits_narrow
            assert is_faster(variant, "dense", square(columns), LENGTH) == expected, variant
        # A call that asks for Hopper's family runs on it in any case.
        assert isinstance(hopper_tile(variant, "dense", "sm_90", "bfloat16", (128, 128), LENGTH), HopperTile)
