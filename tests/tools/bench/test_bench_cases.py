"""What the benchmark times: suites, cases, their work, and the peers that can compute the same."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")

import torch

from bench.cases import pairs, suites
from bench.cases.block_shares import share_of_blocks, shares_by_name
from bench.cases.case import Case, able, merged, with_peers
from bench.cases.flex_mods import MODS
from bench.cases.suites import Sizes, fa3_shape
from bench.options import SPEED, SUITES, parser
from bench.peers import torch_peers as peers
from bench.record import TITLES, parse_name
from bench.runs import speed
from bench.timing.warm_compile import compile_in_parallel, tasks
from codegen.testing.golden import Inputs, Shape, load_manifest

SMALL = Shape(batch=1, heads=2, kv_heads=2, seq=300, dim=64)


def every_case() -> list[Case]:
    return [case for make in suites.SUITES.values() for case in make(Sizes())]


# -------------------------------------------------------------------------------------------------------------- suites


def test_the_command_knows_every_suite() -> None:
    assert tuple(suites.SUITES) == SPEED


def test_names_say_all_there_is_to_a_case() -> None:
    for case in every_case():
        name = parse_name(case.name)
        shape = case.shape
        assert (name.batch, name.heads, name.kv_heads) == (shape.batch, shape.heads, shape.kv_heads)
        assert (name.variant, name.seq, name.dim, str(name)) == (case.variant, shape.seq, shape.dim, case.name)


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="no name of a case"):
        parse_name("causal D64")


def test_fa3_has_16k_tokens_and_hidden_size_2048() -> None:
    for case in suites.fa3(Sizes()):
        assert (case.shape.batch * case.shape.seq, case.shape.heads * case.shape.dim) == (16384, 2048)
        assert set(case.peers) >= {"flex", "flex-max", "fa2", "cudnn", "efficient", "fa4"}


def test_every_variant_is_timed_beside_causal_of_its_shape() -> None:
    cases = suites.variants(Sizes())
    for dim in (64, 128):
        assert {case.variant for case in cases if case.shape == fa3_shape(16384, dim)} == set(load_manifest()) - set(
            suites.OF_PAIRS
        )
    assert not any(case.peers for case in cases)


def test_core_has_what_the_bars_are_about() -> None:
    cases = {case.name: case for case in merged(suites.core(Sizes()))}
    for dim in (64, 128, 256):
        for seq in (2048, 4096, 16384):
            for variant in ("causal", "full"):
                assert "flex-max" in cases[f"{variant} {fa3_shape(seq, dim)}"].peers
    assert any(case.variant == "forgetting" and case.peers == ("fla",) for case in cases.values())
    assert {case.shape.dim for case in cases.values()} == {64, 80, 96, 112, 128, 160, 192, 256}


def test_front_has_each_shape_with_its_peers_and_causal_beside_each_variant() -> None:
    cases = {case.name: case for case in suites.front(Sizes())}
    first, *_ = cases.values()
    assert (first.name, set(first.peers)) == ("causal B1 H16 S16384 D128", {"flex", "cudnn", "fa4"})
    for seq in (512, 128):
        for shape in (fa3_shape(seq, 64), fa3_shape(seq, 256)):
            assert f"causal {shape}" in cases
        assert f"causal B{16384 // seq} H32/8 S{seq} D128" in cases
    variants = {case.variant for case in cases.values()} - {"causal"}
    assert variants == set(suites.FRONT_VARIANTS)
    assert all(f"causal {case.shape}" in cases for case in cases.values())
    assert cases["window(1024) B1 H32 S16384 D64"].peers == ("flex", "fa4")
    assert cases["forgetting B1 H16 S16384 D128"].peers == ("fla",)
    assert not cases["causal_dropout B1 H32 S16384 D64"].peers


def test_lengths_can_be_chosen() -> None:
    assert {case.shape.seq for case in suites.fa3(Sizes(seqs=(512, 65536)))} == {512, 65536}
    assert fa3_shape(65536, 128).batch == 1


# ---------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize(
    ("variant", "scalars"),
    [
        ("full", {}),
        ("causal", {}),
        ("window", {"size": 70}),
        ("prefix_lm", {"length": 70}),
        ("streaming_llm", {"size": 70, "sinks": 4}),
        ("streaming_llm", {"size": 299, "sinks": 4}),
        ("gemma2_local", {}),
        ("gpt_oss", {}),
        ("band", {"before": 70, "after": 9}),
        ("band", {"before": 400, "after": 0}),
        ("chunked", {"size": 70}),
    ],
)
def test_formulas_count_what_the_masks_keep(variant: str, scalars: dict[str, int | float]) -> None:
    assert MODS[variant].pairs(300, scalars) == pairs.count(variant, 300, 1, scalars)


@pytest.mark.parametrize(
    ("variant", "scalars", "share"),
    [
        ("full", {}, 1.0),
        # Four rows of blocks visit 1, 2, 3 and 4 blocks; the mask cuts the last block of each row.
        ("causal", {}, (6 * 128**2 + 4 * 128 * 129 / 2) / (10 * 128**2)),
        # Each row of blocks visits two blocks, except the first.
        ("window", {"size": 128}, (3 * 128**2 + 128 * 129 / 2) / (7 * 128**2)),
    ],
)
def test_the_share_of_blocks_that_is_unmasked(variant: str, scalars: dict[str, int | float], share: float) -> None:
    shape = Shape(batch=1, heads=1, kv_heads=1, seq=512, dim=64)
    case = Case(variant=variant, shape=shape, scalars=scalars)
    assert share_of_blocks(case) == pytest.approx(share)
    wide = Case(variant=variant, shape=replace(shape, batch=2, heads=4, dim=128), scalars=scalars)
    assert shares_by_name([case, wide]) == pytest.approx({case.name: share, wide.name: share})


def test_a_variant_without_a_formula_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MODS, "document")
    shape = Shape(batch=2, heads=2, kv_heads=2, seq=700, dim=64)
    # The documents of the example have 300 tokens.
    assert Case(variant="document", shape=shape).pairs == 2 * (300 * 301 // 2) + 100 * 101 // 2


def inputs_of(variant: str, scalars: dict[str, int | float]) -> Inputs:
    make = MODS[variant].tensors
    empty = torch.empty(0)
    tensors = {} if make is None else make(SMALL, "cpu")
    return Inputs(q=empty, k=empty, v=empty, do=empty, dlse=empty, tensors=tensors, scalars=scalars)


@pytest.mark.parametrize("variant", [name for name in MODS if MODS[name].mask and name != "natten"])
def test_flex_masks_keep_as_many_pairs(variant: str) -> None:
    known: dict[str, dict[str, int | float]] = {
        "window": {"size": 70},
        "prefix_lm": {"length": 70},
        "streaming_llm": {"size": 70, "sinks": 4},
        "band": {"before": 70, "after": 9},
        "band_softcap": {"before": 70, "after": 0, "cap": 50.0},
        "band_sink": {"before": 300, "after": 9},
        "chunked": {"size": 70},
    }
    scalars = known.get(variant, {})
    mods = MODS[variant]
    assert mods.mask is not None
    position = torch.arange(SMALL.seq)
    zero = torch.tensor(0)
    kept = mods.mask(inputs_of(variant, scalars))(zero, zero, position[:, None], position)
    assert kept.expand(SMALL.seq, SMALL.seq).sum() == mods.pairs(SMALL.seq, scalars)


# --------------------------------------------------------------------------------------------------------------- peers


def case(variant: str = "causal", kv_heads: int = 2, **more: Any) -> Case:
    return Case(variant=variant, shape=Shape(batch=1, heads=2, kv_heads=kv_heads, seq=64, dim=16), **more)


def test_peers_are_asked_only_for_what_they_can_compute() -> None:
    assert able(case()) == tuple(name for name in TITLES if name != "ours")
    assert "efficient" not in able(case(kv_heads=1))
    assert able(case("forgetting")) == ("fla",)
    assert able(case("causal_dropout")) == ()
    assert able(case("window")) == ("flex", "flex-max", "fa4")
    assert set(peers.BUILDERS) == set(TITLES)
    assert set(peers.FA4_OPTIONS) == {name for name in MODS if "fa4" in able(case(name))}


def test_peers_can_be_chosen_and_be_absent() -> None:
    assert with_peers(case(peers=("flex", "fa4")), None, absent=["fa4"]).peers == ("flex",)
    assert with_peers(case("forgetting"), ("flex", "fla")).peers == ("fla",)


def test_a_case_of_two_suites_is_timed_once() -> None:
    both = merged([case(peers=("fla",)), case(peers=("flex", "fla")), case("full")])
    assert [(each.variant, each.peers) for each in both] == [("causal", ("flex", "fla")), ("full", ("flex",))]


def test_a_plan_names_what_is_missing_once() -> None:
    options = parser().parse_args(["--suite", "fla,dims,packed", "--only", "D128"])
    plan = speed.plan(options, absent=lambda asked: {"fla": "fla-core"} if "fla" in list(asked) else {})
    assert plan.missing == {"fla": "fla-core"}
    assert not any("fla" in each.peers for each in plan.cases)
    assert list(plan.suites) == ["fla", "dims"]
    assert plan.suites["dims"] == ["causal B2 H16 S8192 D128"]


def test_peers_asked_for_join_suites_that_have_none() -> None:
    options = parser().parse_args(["--suite", "variants", "--peers", "flex", "--quick"])
    plan = speed.plan(options, absent=lambda asked: {})
    assert {each.shape.dim for each in plan.cases} == {128}
    assert {each.variant for each in plan.cases if not each.peers} == {
        *("causal_dropout", "forgetting", "forgetting_pruned", "band_images")
    }


def test_fa4_is_called_with_what_the_variant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        called.update(options)
        return q + k + v, None

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v, do = (torch.randn(1, 2, 64, 16) for _ in range(4))
    inputs = Inputs(q=q, k=k, v=v, do=do, dlse=do[..., 0], scalars={"size": 7})
    results = peers.build("fa4", case("window"), inputs).results()
    assert called == {"causal": True, "window_size": (6, 0)}
    torch.testing.assert_close(results["o"], q + k + v)
    torch.testing.assert_close(results["dq"], do)


# ---------------------------------------------------------------------------------------------------- compiling, times


def test_what_compiles_the_same_is_rehearsed_once() -> None:
    chosen = tasks([case(peers=("flex-max", "cudnn", "fa4")), case(peers=("fa4",))])
    assert [[name for _, name in each] for each in chosen.values()] == [["ours"], ["fa4"], ["flex-max"]]
    lengths = [Case(variant="causal", shape=fa3_shape(seq, 64), peers=("fa4", "flex")) for seq in (512, 1024)]
    names = [[name for _, name in each] for each in tasks(lengths).values()]
    assert [sorted(each) for each in names] == [["ours", "ours"], ["fa4", "flex", "flex"], []]


def test_what_failed_while_it_was_rehearsed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    # A function of this file would make each process import torch.
    assert compile_in_parallel(time.sleep, [0.0, 0.01], 2, None, "compiling") == ""
    missing = compile_in_parallel(time.sleep, [0.0, -1.0, 0.01], 2, None, "compiling")
    assert missing == "1 of 3 failed: RuntimeError: ValueError: sleep length must be non-negative"
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"s; {missing}")


def test_core_is_estimated_at_eight_minutes() -> None:
    options = parser().parse_args(["--suite", "core"])
    plan = speed.plan(options, absent=lambda asked: {})
    assert 300 < sum(speed.estimate_s(plan.cases, jobs=12, budget_ms=speed.BUDGET_MS)) < 480
    assert speed.estimate_s(plan.cases, jobs=0, budget_ms=speed.BUDGET_MS)[0] == 0
    assert f"{len(plan.cases)} cases: about" in speed.describe(plan, options)


# ------------------------------------------------------------------------------------------------------------- options


def test_options_read_lists() -> None:
    options = parser().parse_args(["--suite", "fa3,core,fa3", "--peers", "flex,kvax", "--seqs", "512,2048"])
    assert options.suite == ("fa3", "core")
    assert options.peers == ("flex", "kvax")
    assert options.seqs == (512, 2048)
    assert parser().parse_args([]).suite == parser().parse_args(["--suite", "all"]).suite == SUITES


@pytest.mark.parametrize(
    "argv",
    [
        ["--suite", "fa5"],
        ["--peers", "ours"],
        ["--seqs", "0"],
        ["--seqs", "2k"],
        ["--minutes", "-1"],
        ["--only", "("],
        ["--jobs", "-1"],
        ["--ranks", "0"],
        ["--replay", "0"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(argv)
    assert argv[0] in capsys.readouterr().err


def test_each_list_of_numbers_says_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    for option, what in (("--seqs", "lengths such as 2048,16384"), ("--replay", "numbers of ranks such as 8,64")):
        with pytest.raises(SystemExit):
            parser().parse_args([option, "0"])
        assert capsys.readouterr().err.endswith(f"argument {option}: expected {what}, got '0'\n")


def test_no_case_takes_no_time() -> None:
    assert speed.estimate_s([], jobs=12, budget_ms=speed.BUDGET_MS) == (0, 0)
