"""Chips, tile rules and Hopper's family: the generator and the package it renders hold the same facts."""

from __future__ import annotations

from dataclasses import fields

import pytest

from codegen.arch.chips import ARCHS, CHIPS, GPU_CHIPS, SAME_TILES
from codegen.arch.hopper import FAMILY, HopperFamily
from codegen.arch.tile_rules import TILE_FIELDS, tile_problems
from codegen.plan.traits import VariantTraits
from generated._runtime import archs
from generated._runtime.core import tiles
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.families import refusal
from generated._runtime.core.options import checked_tile
from generated._runtime.core.tuned import gpu_key

TILE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


def test_a_chip_runs_the_tiles_of_one_with_no_more_shared_memory() -> None:
    for name, like in SAME_TILES.items():
        assert like in ARCHS
        assert CHIPS[name].shared_memory >= CHIPS[like].shared_memory


def test_gpus_are_spelt_as_folders_of_tuned_tiles() -> None:
    assert all(gpu_key(gpu.replace("_", " ")) == gpu for gpu in GPU_CHIPS)


@pytest.mark.parametrize("field", TILE_FIELDS)
@pytest.mark.parametrize("value", [0, 1, 2, 3, 8, 9, 16, 24, 32, 64, 256, 512])
def test_spec_and_call_accept_the_same_tiles(field: str, value: int) -> None:
    config = TILE | {field: value}
    if tile_problems(config):
        with pytest.raises(ArgumentError, match=field):
            checked_tile("causal", "fwd", config)
    else:
        assert checked_tile("causal", "fwd", config)._asdict() == config


def test_hopper_serves_the_same_head_dims_in_generator_and_package() -> None:
    for head_dim in range(8, 513):
        reason = refusal(FAMILY.arch, "bfloat16", (head_dim, head_dim), 1024)
        assert FAMILY.serves_head_dim(head_dim) == (reason == ""), head_dim


def test_records_have_the_same_fields_in_generator_and_package() -> None:
    def names(record: type) -> list[str]:
        return [field.name for field in fields(record)]

    assert names(VariantTraits) == names(tiles.VariantTraits)
    assert names(HopperFamily) == names(tiles.HopperFamily)
    assert archs.TILE_VALUES == TILE_FIELDS
