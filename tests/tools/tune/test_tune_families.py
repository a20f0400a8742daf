"""Families of kernels compared on a simulated GPU: which contend, what is checked, what is written."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from codegen.arch.tile_rules import TileConfig
from codegen.spec.model import Pass
from codegen.tune.compiling import Compilers, HopperTask, Task, fault_of
from codegen.tune.families import reserve
from codegen.tune.progress import Progress
from codegen.tune.record import Comparison, Outcome, TunedFile, Winner, Workload
from generated._runtime import kernels
from generated._runtime.core import configs, families, tuned
from generated._runtime.core.options import checked_options
from tests.support.family_races import (
    LONG,
    MACHINE,
    MIDDLE,
    PACKAGE,
    SHORT,
    MadeUpBench,
    comparison,
    families_of,
    family_of,
    judge,
)


def test_verdicts_are_written_and_read(folder: Path, made_up: type[MadeUpBench]) -> None:
    found, left = judge(folder, comparison("fwd"), comparison("bwd"))
    assert not left
    assert [len(judgement.verdicts) for judgement in found] == [2, 2]
    measured = tuned.read(folder / "causal.json")
    assert (measured.gpu, measured.entries) == (MACHINE.gpu, ())
    assert [(verdict.pass_name, verdict.problem.seq) for verdict in measured.verdicts] == [
        ("fwd", 512),
        ("fwd", 16384),
        ("bwd", 512),
        ("bwd", 16384),
    ]
    hashes = kernels.KERNEL_HASHES["causal"]["dense"]
    assert measured.verdicts[0].ms == {"portable": 1.0, "hopper": 0.8}
    assert measured.verdicts[0].kernels == {name: hashes[name] for name in ("fwd", "hopper_fwd")}
    assert measured.verdicts[2].ms == {"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 0.8}
    own = ("dkdv", "dq", "hopper_bwd", "hopper_delta")
    assert measured.verdicts[2].kernels == {name: hashes[name] for name in own}
    (row, *_) = json.loads((folder / "causal.json").read_text())["families"]
    assert row["config"] == {"fwd": configs.default_tiles("causal", "sm_90", 2, 128, 512)["fwd"]._asdict()}
    assert len(made_up.checked) == len(set(made_up.checked))


def test_wide_columns_have_a_backward_of_their_own() -> None:
    named = [families.contending_kernels("bwd", "causal", "dense", (dim, dim)).keys() for dim in (128, 256)]
    assert [sorted(each) for each in named] == [
        ["dkdv", "dq", "hopper_bwd", "hopper_delta"],
        ["dkdv", "dq", "hopper_bwd_wide", "hopper_delta"],
    ]


def test_contenders(folder: Path) -> None:
    compared = families_of(folder)

    def options(pass_: str, variant: str = "causal", **changes: Any) -> dict[str, dict[str, Any]]:
        found = compared.contenders(comparison(pass_, variant, **changes), MIDDLE)
        return {each.name: each.options for each in found}

    defaults = {name: tile._asdict() for name, tile in configs.default_tiles("causal", "sm_90", 2, 128, 2048).items()}
    assert options("fwd") == {
        "portable": {"family": "portable", "config": {"fwd": defaults["fwd"]}},
        "hopper": {"family": "hopper", "config": None},
    }
    assert options("bwd") == {
        "portable": {"family": "portable", "config": defaults},
        "hopper_dkdv": {"family": "hopper", "config": {"dq": defaults["dq"]}},
        "hopper": {"family": "hopper", "config": None},
    }
    # A variant that needs a separate dq for its sums has no kernel that computes all gradients.
    assert list(options("bwd", "band_bias")) == ["portable", "hopper_dkdv"]
    assert list(options("bwd", "relative_bias")) == ["portable", "hopper_dkdv", "hopper"]


def test_options_of_contenders_run_what_they_are_called(folder: Path) -> None:
    compared = families_of(folder)
    for of in (comparison("fwd"), comparison("bwd"), comparison("bwd", head_dim=256)):
        for contender in compared.contenders(of, MIDDLE):
            asked = checked_options("causal", contender.options["config"], contender.family)
            tiles = configs.tiles_for(
                "causal", "dense", "sm_90", "", "bfloat16", (of.head_dim, of.head_dim), (1, 1), 2048, asked
            )
            if of.pass_ == "fwd":
                assert tiles["fwd"].family == contender.name
                continue
            both = {"portable": "portable portable", "hopper_dkdv": "hopper portable", "hopper": "hopper hopper"}
            assert f"{tiles['dkdv'].family} {tiles['dq'].family}" == both[contender.name]


def test_each_tile_of_hoppers_is_checked_at_a_length_that_has_it(folder: Path) -> None:
    compared = families_of(folder)
    for variant, lengths in (("causal", [1024, 1024, 4096]), ("full", [1024, 2048, 2048]), ("softcap", [1024] * 3)):
        found = [compared.contenders(comparison("fwd", variant, 64), each)[1] for each in (SHORT, MIDDLE, LONG)]
        assert [contender.seq for contender in found] == lengths, variant


def test_packed_calls_are_compiled_for_their_heads(folder: Path) -> None:
    """There the stride between the rows of a head is all heads of a token, and this stride is compiled in."""
    compared = families_of(folder)
    for mode, heads in (("dense", [(2, 2)] * 2), ("packed", [(16, 1), (4, 4)]), ("segmented", [(2, 2)] * 2)):
        of = Comparison(variant="causal", mode=mode, dtype="bfloat16", head_dim=128, pass_="bwd")
        workloads = (MIDDLE, Workload(seq=2048, group=4))
        assert [compared.contenders(of, workload)[0].heads for workload in workloads] == heads


def test_verdicts_of_segmented_calls_hold_for_the_kernels_of_their_runs(folder: Path) -> None:
    for pass_, name in (("fwd", "hopper_fwd"), ("bwd", "hopper_bwd")):
        of = Comparison(variant="causal", mode="segmented", dtype="bfloat16", head_dim=128, pass_=pass_)
        found = families_of(folder).kernels(of)
        assert found[f"runs_{name}"] == kernels.KERNEL_HASHES["causal"]["packed"][name] != found[name]
        assert "runs_hopper_bwd_wide" not in found


def test_family_tuner_compiles_each_contender(folder: Path, made_up: type[MadeUpBench]) -> None:
    judge(folder, comparison("bwd"), workloads=[LONG])
    assert made_up.checked
    portable = {task.group.pass_ for task in made_up.pool.tasks if isinstance(task, Task)}
    own = {(task.group.pass_, task.with_dq) for task in made_up.pool.tasks if isinstance(task, HopperTask)}
    assert portable == set(Pass)
    assert own == {(Pass.FWD, True), (Pass.DKDV, True), (Pass.DKDV, False)}


def test_hoppers_kernels_are_compiled_in_other_processes() -> None:
    tasks = [
        HopperTask(package=PACKAGE, arch="sm_90", group=comparison(head_dim=64).group(pass_), with_dq=True, seq=1024)
        for pass_ in (Pass.FWD, Pass.DKDV)
    ]
    names = ["x_fwd", "x_hopper_fwd", "x_bwd_dq", "x_hopper_bwd", "x_hopper_bwd_wide", "x_hopper_delta"]
    assert [name for name in names if tasks[0].is_wanted(name)] == ["x_hopper_fwd"]
    assert [name for name in names if tasks[1].is_wanted(name)] == names[3:]
    with Compilers(1) as compilers:
        assert fault_of(compilers.submit(tasks[0])) == ""


def test_wrong_contenders_do_not_win(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda contender: "wrong: o is off" if contender.family == "hopper" else "")
    (judgement,), _ = judge(folder, comparison("fwd"))
    assert [verdict.taken for verdict in judgement.verdicts] == ["portable", "portable"]
    assert tuned.read(folder / "causal.json").verdicts[0].failed == {"hopper": "wrong: o is off"}
    # The rule chooses Hopper's family, which was wrong, so the measured GPU takes the portable one.
    assert family_of(gpu="") == "hopper"
    assert family_of() == "portable"


def test_without_any_right_contender_there_is_no_verdict(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda _: "wrong: o is off")
    (judgement,), _ = judge(folder, comparison("fwd"))
    assert (judgement.verdicts, judgement.undecided) == ([], "wrong: o is off")
    assert not tuned.read(folder / "causal.json").verdicts
    assert family_of() == "hopper"


def test_untimed_contenders_decide_nothing(
    folder: Path, made_up: type[MadeUpBench], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def race(_self: Any, _contenders: Any, workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
        return ({"portable": 1.0, "hopper": 2.0}, {}) if workload == SHORT else ({"portable": 1.0}, {"hopper": "OOM"})

    monkeypatch.setattr(made_up, "race", race)
    (judgement,), _ = judge(folder, comparison())
    assert (len(judgement.verdicts), judgement.undecided) == (1, "OOM")
    assert [verdict.problem.seq for verdict in tuned.read(folder / "causal.json").verdicts] == [512]
    assert not families_of(folder).has_verdicts(comparison(), [SHORT, LONG])
    Progress(1).judged(judgement)
    assert "others not timed: OOM" in capsys.readouterr().out


@pytest.mark.usefixtures("made_up")
def test_a_budget_leaves_the_rest(folder: Path) -> None:
    assert judge(folder, comparison(), deadline=time.monotonic()) == ([], [comparison()])
    assert reserve(1000.0, comparisons=1, workloads=2, jobs=15) == pytest.approx(7 / 3)
    assert reserve(60.0, comparisons=90, workloads=6, jobs=15) == pytest.approx(18.0)


@pytest.mark.usefixtures("made_up")
def test_family_tuner_skips_known_comparisons(folder: Path) -> None:
    compared, of = families_of(folder), comparison()
    assert not compared.has_verdicts(of, [LONG])
    judge(folder, of)
    assert compared.has_verdicts(of, [SHORT, LONG])
    assert not compared.has_verdicts(of, [MIDDLE])
    assert not compared.has_verdicts(comparison("bwd"), [LONG])
    other = compared.context.file("causal").has_verdicts
    config = {LONG: compared.config(of, LONG)}
    assert other(of, compared.kernels(of), config)
    assert not other(of, compared.kernels(of) | {"hopper_fwd": "another"}, config)
    # With another tile the portable kernel takes another time.
    tile = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    assert not other(of, compared.kernels(of), {LONG: {Pass.FWD: tile}})


@pytest.mark.usefixtures("made_up")
def test_tiles_and_verdicts_share_a_file(folder: Path) -> None:
    group = comparison().group(Pass.FWD)
    tile = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    outcome = Outcome(group=group, winners=[Winner(workload=LONG, tile=tile, ms=1.0, default_ms=2.0)], failed={})
    path, code = folder / "causal.json", kernels.KERNEL_HASHES["causal"]["dense"]["fwd"]
    TunedFile(path, MACHINE).add(outcome, code)
    assert "families" not in json.loads(path.read_text())
    tuned.tuned_entries.cache_clear()
    configs.tiles_for.cache_clear()
    judge(folder, comparison(), workloads=[LONG])
    (row,) = json.loads(path.read_text())["families"]
    assert row["config"] == {"fwd": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3}}
    TunedFile(path, MACHINE).add(outcome, code)
    measured = tuned.read(path)
    assert (len(measured.entries), len(measured.verdicts)) == (1, 1)


def test_verdicts_of_other_code_make_room(folder: Path, made_up: type[MadeUpBench]) -> None:
    judge(folder, comparison())
    path = folder / "causal.json"
    path.write_text(path.read_text().replace(kernels.KERNEL_HASHES["causal"]["dense"]["hopper_fwd"], "0123"))
    made_up.MS = staticmethod(lambda _name, _workload: 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning, because the kernels are about to be measured
        tuned.tuned_entries.cache_clear()
        configs.tiles_for.cache_clear()
        judge(folder, comparison(), workloads=[MIDDLE])
    assert [verdict.problem.seq for verdict in tuned.read(path).verdicts] == [2048]
    judge(folder, comparison(), workloads=[LONG])
    assert [verdict.problem.seq for verdict in tuned.read(path).verdicts] == [2048, 16384]
