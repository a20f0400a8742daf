"""The tiles of calls on paged caches: their ladder, which reads neither batch nor capacity, and bad configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from codegen.arch.paged import PagedPass
from codegen.load.spec_file import load
from generated._runtime.archs import ARCHS
from generated._runtime.core import paged_tiles as ladder
from generated._runtime.core import tuned
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.options import checked_options
from generated._runtime.core.paged_tiles import PagedTiles, checked_paged_config, paged_tiles
from generated._runtime.core.row_classes import PagedSizes, row_classes
from generated._runtime.core.tiles import PagedTile, Tile
from generated._runtime.core.tuned import Measured, PagedEntry, PagedProblem
from tests.support.paths import DEFAULT_SPEC

TILE = {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 3}


def tiles(group: int = 4, config: Any = None, gpu: str = "", head_dim: int = 128, **dtypes: str) -> PagedTiles:
    names = {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | dtypes
    return paged_tiles(
        "causal", "sm_90", gpu, **names, head_dim=head_dim, group=group, config=checked_paged_config("causal", config)
    )


def sizes(found: PagedTiles, *, packed: bool = False, **changes: Any) -> PagedSizes:
    of_call: dict[str, Any] = {"num_seqs": 3, "most_queries": 1, "total_queries": 3, "group": 4, "num_kv_heads": 8}
    of_call |= {"most_keys": 4096, "itemsize": 2, "kv_itemsize": 2, "head_dim": 128}
    return PagedSizes(packed=packed, **of_call | changes, processors=132, tiles=found)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PagedEntry]]:
    """Entries in place of those of a tuned file; a test fills the list."""
    entries: list[PagedEntry] = []
    paged_tiles.cache_clear()
    monkeypatch.setattr(ladder, "measurements", lambda *_: [Measured("", (), (), tuple(entries))])
    yield entries
    paged_tiles.cache_clear()


def entry(group: int, block_n: int, dtype: str = "bfloat16", pass_name: str = "decode") -> PagedEntry:
    problem = PagedProblem(dtype, dtype, 128, group)
    return PagedEntry(pass_name, problem, PagedTile(16, block_n, 8, 2, 1024), 1.0, 2.0, {}, "3.6.0")


# ------------------------------------------------------------------------------------------------------------ defaults


def test_defaults_are_those_of_the_spec() -> None:
    spec = load(DEFAULT_SPEC)
    for arch, table in ARCHS.items():
        for of_size, itemsize in ((table.paged_half, 2), (table.paged_float32, 4)):
            for pass_ in PagedPass:
                wanted = spec.archs[arch].paged_tiles(pass_, itemsize)
                assert {most: tile._asdict() for most, tile in of_size[pass_].items()} == {
                    most: asdict(tile) for most, tile in wanted.items()
                }


@pytest.mark.parametrize(("rows", "blocks"), [(1, [16]), (16, [16]), (17, [64]), (64, [64]), (65, [32])])
def test_one_tile_holds_all_rows_of_a_decoding_sequence(rows: int, blocks: list[int]) -> None:
    found = tiles(config={"paged_fwd": TILE})
    classes = row_classes(sizes(found, group=1, most_queries=rows, total_queries=rows * 3), None)
    assert [each.tile.block_m for each in classes] == blocks


def test_an_architecture_without_tiles_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="no tiles for the architecture sm_70"):
        paged_tiles("causal", "sm_70", "", "bfloat16", "bfloat16", 128, 4)


# -------------------------------------------------------------------------------------------------------------- tuned


def test_the_entry_of_the_nearest_group_is_taken(measured: list[PagedEntry]) -> None:
    measured += [entry(1, 32), entry(8, 128), entry(8, 16, pass_name="paged_fwd"), entry(6, 256, dtype="float16")]
    assert tiles(2).decode.block_n == 32
    assert tiles(6).decode.block_n == 128
    assert tiles(6, dtype="float16", kv_dtype="float16").decode.block_n == 256
    assert tiles(32).decode == PagedTile(16, 128, 8, 2, 1024)
    assert tiles(2).prompts.block_n == 16


def test_entries_of_other_columns_or_sizes_are_not_taken(measured: list[PagedEntry]) -> None:
    measured.append(entry(4, 32))
    assert tiles(4).decode.block_n == 32
    for found in (tiles(4, head_dim=64), tiles(4, dtype="float32", kv_dtype="float32"), tiles(kv_dtype="float8_e5m2")):
        assert found.decode.keys_per_split == 128


@pytest.mark.parametrize(("variant", "kv_dtype", "block_n"), [
    ("causal", "bfloat16", 64), ("causal", "float8_e5m2", 32), ("alibi", "bfloat16", 32),
])  # fmt: skip
def test_prompts_of_latent_attention_have_the_tile_of_their_kernel(
    measured: list[PagedEntry], variant: str, kv_dtype: str, block_n: int
) -> None:
    own = entry(128, 32, pass_name="paged_fwd")
    measured.append(own._replace(problem=PagedProblem("bfloat16", kv_dtype, 576, 128)))
    assert paged_tiles(variant, "sm_90", "", "bfloat16", kv_dtype, 576, 128).prompts.block_n == block_n


def test_stale_entries_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "KERNEL_HASHES", {"causal": {"paged": {"fwd": "new", "plan": "same"}}})
    old = entry(4, 32)._replace(kernels={"fwd": "old", "plan": "same"})
    fresh = old._replace(kernels={"fwd": "new", "plan": "same"})
    assert tuned.stale_parts("causal", Measured("", (), (), (old, fresh))) == ["decode"]
    assert tuned.is_fresh("causal", fresh)


# --------------------------------------------------------------------------------------------------- what a call asks


@pytest.mark.parametrize("converts", [False, True])
def test_only_a_converted_cache_of_8_bits_has_64_rows(converts: bool) -> None:
    """Steps of one head for each of 8 GPUs, of a whole model, and prompts."""
    found = tiles(group=128, head_dim=576, kv_dtype="float8_e4m3fn")
    small: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 576, "kv_itemsize": 1, "converts": converts}
    for group, queries, rows in ((16, 1, 16), (32, 1, 64), (128, 1, 64), (128, 40, 64)):
        (one,) = row_classes(sizes(found, group=group, most_queries=queries, **small), None)
        assert one.tile.block_m == (rows if converts else min(rows, 32))
        assert not (converts and rows == 64 and one.folds)


@pytest.mark.parametrize(("keys_per_split", "block_n"), [(None, 64), (128, 32)])
def test_a_tile_for_few_wide_rows_is_kept(keys_per_split: int | None, block_n: int) -> None:
    """Without a config more than 16 wide rows have the tile of prompts, and splits of at least 1024 keys."""
    asked = {"block_m": 16, "block_n": 32, "num_warps": 8, "num_stages": 2, "keys_per_split": keys_per_split}
    found = tiles(group=32, head_dim=576, config=None if keys_per_split is None else {"decode": asked})
    of_call = sizes(found, group=32, num_kv_heads=1, head_dim=576, asks_decode=keys_per_split is not None)
    (rows,) = row_classes(of_call, None)
    assert (rows.tile.block_m, rows.tile.block_n, rows.least_keys) == (64, block_n, keys_per_split or 1024)


def test_a_config_comes_before_measurements(measured: list[PagedEntry]) -> None:
    measured.append(entry(4, 128))
    found = tiles(config={"decode": TILE})
    assert found.decode == PagedTile(**TILE, keys_per_split=1024)
    assert tiles(config={"decode": TILE | {"keys_per_split": 300}}).decode.keys_per_split == 300
    assert found.prompts == tiles().prompts


def test_the_tile_of_fwd_is_that_of_prompts_unless_they_have_their_own() -> None:
    assert tiles(config={"fwd": TILE}).prompts.tile == Tile(**TILE)
    assert tiles(config={"fwd": TILE}).decode == tiles().decode
    other = TILE | {"block_n": 16}
    assert tiles(config={"fwd": TILE, "paged_fwd": other}).prompts.tile == Tile(**other)


def test_other_calls_check_what_is_said_of_paged_caches_and_leave_it() -> None:
    config = {"decode": TILE | {"keys_per_split": 64}, "dq": TILE}
    assert checked_options("causal", config).tiles == (("dq", Tile(**TILE)),)
    with pytest.raises(ArgumentError, match="block_m"):
        checked_options("causal", {"decode": TILE | {"block_m": 17}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "config: expected None or a dict"),
        ({"forward": TILE}, "config: expected passes among fwd, dkdv, dq, decode, paged_fwd, got 'forward'"),
        ({"decode": TILE | {"keys_per_split": 0}}, r"config\['decode'\]\['keys_per_split'\]: expected an int of at"),
        ({"decode": TILE | {"keys_per_split": True}}, r"config\['decode'\]\['keys_per_split'\]: expected an int"),
        ({"fwd": TILE | {"keys_per_split": 64}}, r"config\['fwd'\]: expected a mapping with block_m"),
        ({"paged_fwd": {"block_m": 64}}, r"config\['paged_fwd'\]: expected a mapping with block_m"),
        ({"paged_fwd": TILE | {"num_warps": 3}}, r"config\['paged_fwd'\]\['num_warps'\]: expected a power of two"),
    ],
)
def test_bad_configs(config: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        checked_paged_config("causal", config)


# -------------------------------------------------------------------------------------------------------------- splits


def test_splits_begin_where_a_block_does() -> None:
    found = tiles(config={"decode": TILE | {"keys_per_split": 300}})
    (decoding,) = row_classes(sizes(found), None)
    assert (decoding.least_keys, decoding.tile) == (320, Tile(**TILE))
    assert row_classes(sizes(found), 100)[0].least_keys == 128
    assert row_classes(sizes(found), 1)[0].most_splits == 1


def test_a_rule_for_splits_knows_neither_batch_nor_capacity() -> None:
    def rules(**changes: int) -> list[tuple[object, ...]]:
        classes = row_classes(sizes(tiles(), packed=True, most_queries=100, **changes), None)
        return [(c.first_rows, c.last_rows, c.tile, c.most_splits, c.least_keys) for c in classes]

    assert len(rules()) == 3
    assert rules() == rules(num_seqs=1000, total_queries=10**5) == rules(most_keys=2**20) == rules(most_keys=1)
