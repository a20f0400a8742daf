"""Families of kernels in the commands tune, explain and check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from codegen.arch.tile_rules import TileConfig
from codegen.cli import main as cli
from codegen.compile.packages import Package
from codegen.spec.model import Pass
from codegen.tune import command
from codegen.tune import tuner as tuner_module
from codegen.tune.command import Choice
from codegen.tune.measuring import Contender
from codegen.tune.progress import Progress, family_totals
from codegen.tune.record import Group, Judgement, Machine, TunedFile, Workload
from codegen.util.errors import CodegenError
from generated._runtime.core import tuned
from tests.support.family_races import MACHINE, MadeUpBench, comparison, families_of, judge, times, verdict
from tests.support.inline_pool import InlinePool
from tests.support.paths import ROOT


def test_progress_says_where_the_rule_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(4)
    times = {"portable": 1.2, "hopper": 1.5}
    held = verdict(times, "portable", "portable")
    other = verdict(times, "hopper", "portable")
    lost = verdict({"portable": 1.2}, "hopper", "portable", hopper="wrong: o is off")
    for verdicts in ([held, other], [lost], [held]):
        progress.judged(Judgement(comparison=comparison(), verdicts=verdicts))
    progress.judged(Judgement(comparison=comparison(), verdicts=[], undecided="OutOfResources"))
    lines = capsys.readouterr().out.splitlines()
    said = "[1/4] causal bfloat16 D128 fwd, families: 1 of 2 by the default rule; "
    assert lines[0].startswith(f"{said}portable for hopper at seq 16384 group 1, 1.25 times as fast")
    assert "portable for hopper at seq 16384 group 1, which does not run; hopper failed: wrong: o is off" in lines[1]
    assert "no verdict: OutOfResources" in lines[3]
    total = family_totals(progress.judgements)
    assert (
        total == "families: the rule holds in 2 of 4 cases; the others gain 1.250 on average (geometric), 1.25 at most"
    )
    assert family_totals([]) == "no families were compared"


def options(**changes: Any) -> Choice:
    given: dict[str, Any] = {"variants": ["causal", "causal_dropout"], "passes": [], "dtypes": ["bfloat16"]}
    given |= {"head_dims": [64, 32], "seqs": [512], "modes": [], "minutes": 0.0, "jobs": 1, "families": False}
    given |= {"variants_path": ROOT / "variants.yaml", "out": ROOT / "generated", "again": False}
    return Choice(**given | changes)


@pytest.fixture
def machine(folder: Path, made_up: type[MadeUpBench], monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    """The command finds a GPU that is made up."""
    del folder

    class Bench:
        """All tiles are right and equally fast."""

        def __init__(self, _package: Package, group: Group) -> None:
            self.group = group

        def check(self, _tile: TileConfig, _seq: int) -> str:
            return ""

        def time(self, _tile: TileConfig, _workload: Workload) -> float:
            return 1.0

        def duel(self, tiles: Sequence[TileConfig], _workload: Workload) -> list[float]:
            return [1.0 for _ in tiles]

    monkeypatch.setattr(command, "this_machine", lambda: MACHINE)
    monkeypatch.setattr(tuner_module, "Bench", Bench)
    monkeypatch.setattr(tuner_module, "Compilers", lambda _jobs: InlinePool())
    monkeypatch.setattr(tuner_module, "multiprocessors", lambda: 132)
    return made_up


def test_families_come_behind_tiles(
    folder: Path, machine: type[MadeUpBench], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.MS = times(portable=1.0, hopper=0.9, hopper_dkdv=0.9)
    command.run(options(passes=["fwd"]))
    printed = capsys.readouterr().out
    assert "4 kernels to tune, 0 tuned already" in printed
    # Hopper's family has no kernel for a head_dim of 32.
    assert "families of 2 forwards and backwards to compare, 0 compared already" in printed
    assert "families: the rule holds in 0 of" in printed
    assert "hopper for portable at seq 512 group 1, 1.11 times as fast" in printed
    measured = tuned.read(folder / "causal.json")
    assert {verdict.problem.head_dim for verdict in measured.verdicts} == {64}
    assert {entry.problem.head_dim for entry in measured.entries} == {64, 32}
    command.run(options(passes=["fwd"]))
    printed = capsys.readouterr().out
    assert "0 kernels to tune, 4 tuned already" in printed
    assert "families of 0 forwards and backwards to compare, 2 compared already" in printed


@pytest.mark.usefixtures("machine")
def test_families_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(options(variants=["causal"], families=True, head_dims=[64]))
    printed = capsys.readouterr().out
    assert "kernels to tune" not in printed
    assert "[2/2] causal bfloat16 D64 bwd, families" in printed
    measured = tuned.read(folder / "causal.json")
    assert not measured.entries
    assert [(v.pass_name, v.problem.seq, v.problem.group) for v in measured.verdicts] == [
        ("fwd", 512, 1),
        ("fwd", 512, 4),
        ("bwd", 512, 1),
        ("bwd", 512, 4),
    ]


def test_masks_with_arguments_are_compared_where_they_are_named(folder: Path) -> None:
    """Long and short windows or documents run other kernels, and the example is only one of these cases."""
    groups = [
        Group(variant=variant, mode="dense", dtype="bfloat16", head_dim=64, pass_=Pass.FWD)
        for variant in ("causal", "natten", "forgetting", "gemma2_local", "window", "document", "padding")
    ]

    def compared(*named: str) -> list[str]:
        return [each.variant for each in command.comparisons_of(groups, families_of(folder), named)]

    assert compared() == ["causal", "natten", "forgetting", "gemma2_local"]
    assert compared("window", "document") == ["causal", "natten", "forgetting", "gemma2_local", "window", "document"]


@pytest.mark.usefixtures("machine")
def test_either_pass_of_a_backward_has_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    command.run(options(variants=["causal"], families=True, head_dims=[64], passes=["dq"]))
    assert "[1/1] causal bfloat16 D64 bwd, families" in capsys.readouterr().out


@pytest.mark.usefixtures("machine")
def test_a_budget_is_shared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []
    original = tuner_module.Tuner.__init__

    def noted(self: Any, context: Any, request: Any, *callbacks: Any) -> None:
        budgets.append(request.budget)
        original(self, context, request, *callbacks)

    monkeypatch.setattr(tuner_module.Tuner, "__init__", noted)
    command.run(options(variants=["causal"], head_dims=[64], minutes=1.0))
    assert "[2/2] causal bfloat16 D64 bwd, families" in capsys.readouterr().out
    command.run(options(variants=["causal"], head_dims=[64], minutes=1.0))
    # Families that are compared already need no time.
    assert budgets == [pytest.approx(0.7 * 60), 60.0]


@pytest.mark.usefixtures("folder")
def test_where_there_is_one_family_the_option_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "this_machine", lambda: Machine(gpu="NVIDIA A100", arch="sm_80", triton="3.6.0"))
    with pytest.raises(CodegenError, match=r"--families: expected .* on sm_90; .* This GPU is NVIDIA A100 \(sm_80\)"):
        command.run(options(families=True))


@pytest.mark.usefixtures("made_up")
def test_an_interrupted_comparison_goes_on(
    folder: Path, machine: type[MadeUpBench], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(contender: Contender) -> str:
        if contender.name == "hopper_dkdv":
            raise KeyboardInterrupt
        return ""

    machine.FAULTS = staticmethod(interrupted)
    wanted = options(variants=["causal"], families=True, head_dims=[64])
    with pytest.raises(KeyboardInterrupt):
        command.run(wanted)
    assert "1 of 2 comparisons are made and written; run the same command again to continue" in capsys.readouterr().err
    assert {verdict.pass_name for verdict in tuned.read(folder / "causal.json").verdicts} == {"fwd"}
    machine.FAULTS = staticmethod(lambda _: "")
    command.run(wanted)
    assert "families of 1 forwards and backwards to compare, 1 compared already" in capsys.readouterr().out


def explained(capsys: pytest.CaptureFixture[str], variant: str, seq: int, head_dim: int = 128) -> str:
    wanted = ["explain", variant, "--gpu", "imaginary_1", "--dtype", "bf16", "--seq", str(seq)]
    wanted += ["--head-dim", str(head_dim)]
    assert cli.main(wanted) == cli.EXIT_OK
    return capsys.readouterr().out


def test_explain_says_what_was_measured(
    folder: Path, made_up: type[MadeUpBench], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("codegen.inspect.explain.GPU_CHIPS", {"imaginary_1": "sm_90"})
    made_up.MS = times(portable=1.0, hopper=1.5, hopper_dkdv=0.75)
    judge(folder, comparison("fwd"), comparison("bwd"))
    printed = explained(capsys, "causal", 10_000)
    place = "imaginary_1/causal.json: bfloat16 seq 16384 group 1"
    assert (
        f"fwd: portable, by measurement, against the default rule: {place}: portable 1 ms, hopper 1.5 ms, Triton 3.6.0"
        in printed
    )
    assert (
        f"bwd: hopper with a portable dq, by measurement, against the default rule: {place}: hopper with a portable"
        in printed
    )
    assert (
        "family: a call's family=, config= or deterministic=, else such a measurement, else the default rule" in printed
    )
    made_up.MS = times(portable=1.0, hopper=1.005, hopper_dkdv=1.5)
    made_up.FAULTS = staticmethod(lambda contender: "wrong: dq is off" if contender.name == "hopper_dkdv" else "")
    judge(folder, comparison("fwd"), comparison("bwd"))
    printed = explained(capsys, "causal", 10_000)
    assert f"fwd: hopper, by the default rule, which the measurement confirms: {place}: portable 1 ms" in printed
    assert "hopper with a portable dq none (wrong: dq is off)" in printed
    assert "natten" not in printed
    assert "could run the family hopper" in explained(capsys, "natten", 10_000)
    wide = (
        "dkdv and dq not of the family hopper: beyond 256 columns its backward serves no score but the scaled product"
    )
    assert wide in explained(capsys, "softcap", 10_000, head_dim=512)
    assert "in no fixed order" not in explained(capsys, "causal", 10_000, head_dim=512)


def test_check_notes_verdicts_on_other_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("variants: {mine: {mask: causal}}")
    wanted = ["--variants", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "judged_ops")]
    assert cli.main(["render", *wanted]) == cli.EXIT_OK
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "judged_ops" / "tuned" / "imaginary_1" / "mine.json"
    judgement = Judgement(
        comparison=comparison(variant="mine"), verdicts=[verdict({"hopper": 1.0}, "hopper", "hopper")]
    )
    TunedFile(path, MACHINE).judge(judgement, {"fwd": "0123"})
    assert cli.main(["check", *wanted]) == cli.EXIT_OK
    assert "note: tuned/imaginary_1/mine.json: families of fwd measured on other kernels" in capsys.readouterr().out
