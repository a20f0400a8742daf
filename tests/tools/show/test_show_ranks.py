"""`show --ranks`: which rank computes which blocks, the cost of each rank, and the error of each bad argument."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from codegen.cli.main import main
from codegen.compile.packages import find_package
from codegen.inspect.call import make_call, make_packed_calls
from codegen.inspect.ranks import Split, Visits, planned, variant_work
from codegen.load.spec_file import load
from generated._runtime.core.work import Rows, VariantWork, visited_blocks, work_of
from generated.torch_parallel import plan
from tests.support.paths import ROOT

SPEC = load(ROOT / "variants.yaml")
SPLIT = Split(ranks=4, heads=(8, 2), head_dim=64, strategy="gather")

CAUSAL = """\
1024 queries (down) by 1024 keys (across); each number is the rank that computes there

 0 . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . .
 0 0 . . . . . . . . . . . . . . . . . . . . . . . . . . . . . .
"""


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["show", *options, "--variants", str(ROOT / "variants.yaml")]) == 0
    return capsys.readouterr().out


def test_a_causal_call_is_drawn_as_the_zigzag(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal", "--ranks", "2", "--seq", "1024", "--strategy", "gather")
    assert CAUSAL in text
    assert "rank  has                " in text
    assert "0     rows 0-255, 768-1023" in text
    assert "slowest rank 0.00 % over the mean" in text
    lines = [line.split() for line in text.splitlines() if line.startswith(" ")]
    assert [line[0] for line in lines] == ["0"] * 8 + ["1"] * 16 + ["0"] * 8
    assert [line.count(".") for line in lines] == list(range(31, -1, -1))


def test_documents_are_drawn_apart_and_every_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal", "--ranks", "2", "--segments", "300,100,624", "--strategy", "gather")
    picture = [line.split() for line in text.splitlines() if line.startswith(" ")]
    height, width = 1024 // len(picture), 1024 // len(picture[0])
    second = picture[-(-300 // height) : 400 // height]
    assert second
    assert all(cell == "." for row in second for cell in row[: 300 // width])
    assert {cell for row in picture for cell in row} <= {".", "0", "1", "*"}


def test_heads_belong_to_ranks_where_all_compute_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "full", "--ranks", "4", "--seq", "4096", "--heads", "8", "--strategy", "heads")
    assert "heads 0-1" in text
    assert "heads 6-7" in text
    assert "* every rank, for its own heads" in text


def test_nodes_are_drawn_and_their_ranks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal", "--ranks", "2x4", "--seq", "1024", "--heads", "8/4")
    assert CAUSAL.replace("rank that", "node that") in text
    assert "0     heads 0-1, rows 0-255, 768-1023" in text
    assert "5     heads 2-3, rows 256-767" in text
    assert "2d: heads inside nodes of 4 ranks, gather over 2 nodes" in text


def test_each_rank_has_its_own_work_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "window", "--ranks", "4", "--seq", "32768", "--set", "size=1024", "--strategy", "gather")
    rows = [line.split("  ") for line in text.splitlines() if line[:1] in "0123" and "rows" in line]
    assert len(rows) == 4
    assert all(" ms" in row[-1] for row in rows)


@pytest.mark.parametrize("name", sorted(SPEC.variants))
def test_the_work_is_that_of_the_rendered_package(name: str) -> None:
    variant, seq = SPEC.variants[name], 2048
    call = make_call(variant, q_len=seq, kv_len=seq, q_offset=0, batch=0, head=0, scalars={}, files={})
    rendered = work_of(getattr(__import__("generated.torch", fromlist=[name]), name))
    made = variant_work(VariantWork, variant)
    own = {variant.keywords.get(key, key): x for key, x in {**call.scalars, **call.tensors}.items()}
    rows = Rows.of(seq, 4, None, in_table=rendered.may_visit is not None)
    assert np.array_equal(visited_blocks(made, rows, own), visited_blocks(rendered, rows, own))
    assert (made.needs, made.tensors, made.by_heads) == (
        tuple(rendered.needs),
        dict(rendered.tensors),
        rendered.by_heads,
    )


@pytest.mark.parametrize("name", ["causal", "document", "padding", "prefix_lm"])
def test_packed_calls_are_planned_as_the_package_does(name: str) -> None:
    lengths, variant = [600, 100, 1348], SPEC.variants[name]
    calls = make_packed_calls(variant, lengths=lengths, q_offset=0, head=0, scalars={}, files={})
    layout, _ = planned(ROOT / "generated", variant, calls, lengths, SPLIT)
    assert layout.seq == sum(lengths)
    assert sum(layout.loads) > 0
    table = Visits.of(variant, calls)
    assert not table.visited[np.ix_(table.rows < 600, table.keys >= 600)].any()


def test_needed_keys_are_those_that_own_rows_visit() -> None:
    variant = SPEC.variants["window"]
    call = make_call(variant, q_len=4096, kv_len=4096, q_offset=0, batch=0, head=0, scalars={"size": "512"}, files={})
    table = Visits.of(variant, [call])
    assert table.keys_of([(2048, 1024)], 4096) == pytest.approx((1024 + 512) / 4096, abs=0.01)
    assert table.keys_of([], 4096) == 0.0


def test_the_plan_is_the_one_that_plan_makes() -> None:
    assert find_package(ROOT / "generated").name == "generated"
    from generated.torch import causal

    variant = SPEC.variants["causal"]
    call = make_call(variant, q_len=4096, kv_len=4096, q_offset=0, batch=0, head=0, scalars={}, files={})
    layout, _ = planned(ROOT / "generated", variant, [call], [], SPLIT)
    assert layout.chunks == plan(causal, 4, seq=4096, heads=(8, 2), head_dim=64, strategy="gather").chunks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3", "--seq", "2"], "plan: seq: expected at least a row for each of 3 ranks, got 2"),
        (["--ranks", "2", "--q-len", "64"], "--q-len is no option of a call over several ranks: leave it out; --seq"),
        (["--ranks", "2", "--segments", "5,3", "--seq", "8"], "--seq is no option of a call over several ranks"),
        (["--ranks", "2", "--q-offset", "0"], "--q-offset is no option of a call over several ranks"),
        (["--seq", "64"], "--seq goes with --ranks"),
        (["--heads", "8/2"], "--heads goes with --ranks"),
        (["--head-dim", "64"], "--head-dim goes with --ranks"),
        (["--strategy", "auto"], "--strategy goes with --ranks"),
        (["--out", "generated"], "--out goes with --ranks: leave it out; --variants names the spec"),
        (["--package", "generated"], "--package goes with --ranks: leave it out; --variants names the spec"),
        (["--ranks", "2", "--strategy", "fast"], "plan: strategy: expected 'auto'"),
        (["--ranks", "2", "--heads", "6/4"], "plan: heads: expected (query heads, key heads)"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "causal", *options, "--variants", str(ROOT / "variants.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_ranks_are_a_number_or_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "causal", "--ranks", "2x3x4"])
    assert "expected a number of ranks such as 8, or nodes such as 2x8, got '2x3x4'" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--out", str(tmp_path), "--variants", str(ROOT / "variants.yaml")]
    assert main(["show", "causal", *options]) == 2
    assert "no generated package there" in capsys.readouterr().err
