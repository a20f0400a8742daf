"""How `explain` and `show` split the keys of a sequence, compared with the device's plan; and what they print."""

from __future__ import annotations

import doctest

import pytest

from codegen.cli.main import main
from codegen.inspect import decode
from codegen.inspect.decode import FEW_ROWS, FOLDED, SPLITS_PER_PROCESSOR, Splitting, split
from codegen.load.spec_file import load
from generated._runtime.core import row_classes as runtime
from tests.support.paths import DEFAULT_SPEC, ROOT

SPEC = load(DEFAULT_SPEC)
HOW = Splitting(block_m=16, block_n=64, keys_per_split=128, group=4, kv_heads=2)


def test_examples() -> None:
    assert doctest.testmod(decode, raise_on_error=True).attempted > 0
    assert (SPLITS_PER_PROCESSOR, FOLDED) == (runtime.SPLITS_PER_PROCESSOR, runtime.FOLDED)
    assert runtime.CLASSES[:-1] == FEW_ROWS


def test_parts_are_whole_blocks_of_what_is_read() -> None:
    (tile,) = split(SPEC.variants["streaming_llm"], HOW, q_len=1, kv_len=1000, scalars={"size": 300, "sinks": 4})
    assert (tile.q_first, tile.q_last) == (999, 999)
    assert list(tile.read) == [range(4), range(700, 1000)]
    assert [list(part.ranges) for part in tile.parts] == [
        [range(64), range(640, 704)],
        [range(704, 832)],
        [range(832, 960)],
        [range(960, 1000)],
    ]


def test_a_long_sequence_is_cut_into_as_many_parts_as_occupy_the_chip() -> None:
    (tile,) = split(SPEC.variants["causal"], HOW, q_len=1, kv_len=131_072)
    assert (tile.part_keys, len(tile.parts)) == (1024, 128)
    assert sum(part.keys for part in tile.parts) == 131_072
    tiles = split(SPEC.variants["causal"], HOW, q_len=8, kv_len=131_072)
    assert [(t.q_first, t.q_last, len(t.parts)) for t in tiles] == [(131_064, 131_067, 64), (131_068, 131_071, 64)]


def test_a_sequence_without_keys_has_one_part() -> None:
    (tile,) = split(SPEC.variants["causal"], HOW, q_len=1, kv_len=0)
    assert [part.keys for part in tile.parts] == [0]


# --------------------------------------------------------------------------------------------------------- the commands


def test_explain_lists_splits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    options = ("--gpu", "sm_80", "--group", "20", "--kv-heads", "4")
    assert main(["explain", "gemma2_local", *options]) == 0
    printed = capsys.readouterr().out
    assert "on paged caches, with any batch size and page size: group 20, 4 key heads" in printed
    assert "decode     16       64       4          3           128             default of sm_80" in printed
    assert "131072  126976 to 131071        32      128" in printed
    assert "their pages may be freed" in printed
    assert main(["explain", "document", *options]) == 0
    assert "every key is read, then masked" in capsys.readouterr().out
    assert main(["explain", "natten", *options]) == 0
    assert "a split reads only from the block of its first visible key" in capsys.readouterr().out
    assert main(["explain", "causal", "--gpu", "sm_90", "--head-dim", "128"]) == 0
    assert "run the family hopper on pages of 16 keys and more, a multiple of 8" in capsys.readouterr().out
    assert main(["explain", "causal_dropout", *options]) == 0
    assert "on paged caches" not in capsys.readouterr().out


def test_show_draws_pages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["show", "window", "--pages", "16", "--kv-len", "640", "--set", "size=100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 query at position 639, 640 keys in 40 pages of 16, b = 0, h = 0" in lines
    assert "." * 33 + "▒" + "█" * 6 in lines
    assert "639      0     540 to 639  33 to 39" in lines
    assert "pages read   7 of 40" in lines


def test_show_draws_what_a_mask_without_bounds_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last query sees 13 x 13 positions of the last rows of a canvas 128 wide."""
    monkeypatch.chdir(ROOT)
    assert main(["show", "natten", "--pages", "64", "--kv-len", "16384"]) == 0
    printed = capsys.readouterr().out
    # The pages from the block with the first of these positions to the last key.
    assert "pages read   22 of 256" in printed
    assert "." * 57 in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["causal_dropout", "--pages", "16"], "'causal_dropout' has no kernels on paged caches"),
        (["causal", "--pages", "16", "--segments", "3,4"], "--pages shows one sequence"),
        (["causal", "--pages", "16", "--block", "64"], "in text: leave it out, or --block"),
        (["causal", "--pages", "16", "--png", "x.png"], "in text: leave it out, or --png"),
        (["causal", "--pages", "16", "--q-offset", "3"], "in text: leave it out, or --q-offset"),
        (["causal", "--pages", "16", "--q-len", "9", "--kv-len", "8"], "--q-len: expected at most the 8 keys"),
    ],
)
def test_show_pages_bad_input(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["show", *options]) == 2
    assert message in capsys.readouterr().err
