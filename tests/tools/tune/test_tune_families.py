"""Families of kernels compared on a GPU that is made up: what is timed, what is written; what calls then run."""

from __future__ import annotations

import doctest
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from codegen.arch.tile_rules import TileConfig
from codegen.cli import main as cli
from codegen.compile.packages import Package
from codegen.load.spec_file import load
from codegen.spec.model import Pass
from codegen.testing.calls import draw_call
from codegen.tune import command, measuring, timing
from codegen.tune import families as families_module
from codegen.tune import tuner as tuner_module
from codegen.tune.command import Choice
from codegen.tune.compiling import Compilers, HopperTask, Task, fault_of
from codegen.tune.families import Families, FamilyRequest, FamilyTuner, reserve
from codegen.tune.measuring import Contender, FamilyBench
from codegen.tune.progress import Progress, family_totals
from codegen.tune.record import Comparison, Group, Judgement, Machine, Outcome, TunedFile, Verdict, Winner, Workload
from codegen.tune.tuner import Context
from codegen.util.errors import CodegenError
from generated._runtime import kernels
from generated._runtime.core import configs, families, tuned
from generated._runtime.core.options import NO_OPTIONS, CallOptions, checked_options
from tests.support.inline_pool import InlinePool
from tests.support.paths import ROOT

SPEC = load(ROOT / "variants.yaml")
PACKAGE = Package(root=str(ROOT), name="generated")
MACHINE = Machine(gpu="NVIDIA Imaginary 1", arch="sm_90", triton="3.6.0")
SHORT, MIDDLE, LONG = (Workload(seq=seq, group=1) for seq in (512, 2048, 16384))
Times = Callable[[str, Workload], float]


def comparison(pass_: str = "fwd", variant: str = "causal", head_dim: int = 128) -> Comparison:
    return Comparison(variant=variant, mode="dense", dtype="bfloat16", head_dim=head_dim, pass_=pass_)


class MadeUpBench:
    """Contenders that take what `MS` says, and fail as `FAULTS` says."""

    MS: Times
    FAULTS: Callable[[Contender], str]
    checked: ClassVar[list[Contender]]
    pool: ClassVar[InlinePool]

    def __init__(self, _package: Package, of: Comparison) -> None:
        self.comparison = of

    def check(self, contender: Contender) -> str:
        type(self).checked.append(contender)
        return type(self).FAULTS(contender)

    def race(self, contenders: Sequence[Contender], workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
        return {each.name: type(self).MS(each.name, workload) for each in contenders}, {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose tuned files the package reads, and the tuner writes."""

    def path_of(gpu: str, variant: str, _package: Path | None = None) -> Path:
        return tmp_path / "tuned" / gpu / f"{variant}.json"

    def forget() -> None:
        tuned.tuned_entries.cache_clear()
        configs.tiles_for.cache_clear()

    monkeypatch.setattr(tuned, "tuned_path", path_of)
    forget()
    yield tmp_path / "tuned" / "imaginary_1"
    forget()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    class Bench(MadeUpBench):
        MS = staticmethod(lambda name, _: {"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 0.8}[name])
        FAULTS = staticmethod(lambda _: "")

    Bench.checked, Bench.pool = [], InlinePool()
    monkeypatch.setattr(families_module, "FamilyBench", Bench)
    monkeypatch.setattr(families_module, "Compilers", lambda _jobs: Bench.pool)
    return Bench


def families_of(folder: Path) -> Families:
    return Families(Context(spec=SPEC, package=PACKAGE, folder=folder.parent.parent, machine=MACHINE))


def judge(
    folder: Path, *comparisons: Comparison, workloads: Sequence[Workload] = (SHORT, LONG), deadline: float = math.inf
) -> tuple[list[Judgement], list[Comparison]]:
    """What the tuner finds, after which calls run as it says."""
    found: list[Judgement] = []
    request = FamilyRequest(comparisons=comparisons, workloads=workloads, deadline=deadline, jobs=2)
    compared = families_of(folder)
    left = FamilyTuner(compared, request, found.append, lambda _: None).run()
    compared.forget()
    return found, left


def family_of(
    name: str = "fwd",
    variant: str = "causal",
    seq: int = 16384,
    head_dim: int = 128,
    group: int = 1,
    dtype: str = "bfloat16",
    mode: str = "dense",
    gpu: str = "imaginary_1",
    options: CallOptions = NO_OPTIONS,
) -> str:
    """The family of a kernel of a call."""
    dims = (head_dim, head_dim)
    return configs.tiles_for(variant, mode, "sm_90", gpu, dtype, dims, (group, 1), seq, options)[name].family


# --------------------------------------------------------------------------------------------------------------- tuner


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
    # What has sums for a dq of its own has no kernel for all.
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
    for variant, lengths in (("causal", [1024, 1024, 8192]), ("full", [1024, 2048, 2048]), ("alibi", [1024] * 3)):
        found = [compared.contenders(comparison("fwd", variant, 64), each)[1] for each in (SHORT, MIDDLE, LONG)]
        assert [contender.seq for contender in found] == lengths, variant


def test_packed_calls_are_compiled_for_their_heads(folder: Path) -> None:
    """The rows of a head are all heads of a token apart there, which a kernel is compiled for."""
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
    # Though the rule has it, and though nothing is known of a gain.
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
    # Beside another tile the portable kernel takes another time.
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
        warnings.simplefilter("error")  # they are about to be measured
        tuned.tuned_entries.cache_clear()
        configs.tiles_for.cache_clear()
        judge(folder, comparison(), workloads=[MIDDLE])
    assert [verdict.problem.seq for verdict in tuned.read(path).verdicts] == [2048]
    judge(folder, comparison(), workloads=[LONG])
    assert [verdict.problem.seq for verdict in tuned.read(path).verdicts] == [2048, 16384]


# --------------------------------------------------------------------------------------------------------- the package


def times(**ms: float) -> Times:
    """The same times at every workload."""
    return staticmethod(lambda name, _: ms[name])


def test_measurements_overrule_the_rule(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=1.02, hopper_dkdv=1.02)
    judge(folder, comparison("fwd"), comparison("bwd"))
    assert [family_of(name) for name in configs.PASSES] == ["portable"] * 3
    assert [family_of(name, gpu="") for name in configs.PASSES] == ["hopper"] * 3
    assert [family_of(name, gpu="imaginary_2") for name in configs.PASSES] == ["hopper"] * 3


def test_less_than_a_percent_is_noise(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=1.005, hopper_dkdv=0.999)
    (forward, backward), _ = judge(folder, comparison("fwd"), comparison("bwd"), workloads=[LONG])
    assert [forward.verdicts[0].taken, backward.verdicts[0].taken] == ["hopper", "hopper"]
    assert [family_of(name) for name in configs.PASSES] == ["hopper"] * 3


def test_kernels_of_a_backward(folder: Path, made_up: type[MadeUpBench]) -> None:
    for ms, wanted, in_order in (
        ({"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 1.0}, "hopper portable", "hopper portable"),
        ({"portable": 1.0, "hopper_dkdv": 1.1, "hopper": 0.9}, "hopper hopper", "portable portable"),
        ({"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 0.8}, "hopper hopper", "hopper portable"),
    ):
        made_up.MS = times(**ms)
        judge(folder, comparison("bwd"))
        assert f"{family_of('dkdv')} {family_of('dq')}" == wanted
        # One kernel for all keeps no order: what does is chosen of the others.
        in_fixed_order = checked_options("causal", None, None, True)
        assert f"{family_of('dkdv', options=in_fixed_order)} {family_of('dq', options=in_fixed_order)}" == in_order


def test_a_call_that_names_a_family_gets_it(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=2.0, hopper_dkdv=2.0)
    judge(folder, comparison("fwd"), comparison("bwd"))
    hopper = checked_options("causal", None, "hopper")
    assert [family_of(name, options=hopper) for name in configs.PASSES] == ["hopper"] * 3
    made_up.MS = times(portable=2.0, hopper=1.0, hopper_dkdv=1.1)
    judge(folder, comparison("fwd", "natten"), comparison("bwd", "natten"))
    assert [family_of(name, "natten") for name in configs.PASSES] == ["hopper"] * 3
    portable = checked_options("natten", None, "portable")
    assert [family_of(name, "natten", options=portable) for name in configs.PASSES] == ["portable"] * 3
    own = checked_options("natten", {"fwd": configs.Tile(64, 64, 4, 2)._asdict()})
    assert [family_of(name, "natten", options=own) for name in configs.PASSES] == ["portable", "hopper", "hopper"]


def test_the_nearest_verdict_counts(folder: Path, made_up: type[MadeUpBench]) -> None:
    def slow_when_short(name: str, workload: Workload) -> float:
        return 2.0 if name == "hopper" and workload.seq == 512 else 1.0 if name == "portable" else 0.9

    made_up.MS = staticmethod(slow_when_short)
    judge(folder, comparison())
    assert [family_of(seq=seq) for seq in (128, 512, 2800, 3000, 100_000)] == ["portable"] * 3 + ["hopper"] * 2
    assert family_of(seq=512, group=8) == "portable"
    assert family_of(seq=512, dtype="float16") == "portable"
    assert family_of(seq=512, head_dim=112) == "portable"
    assert family_of(seq=512, head_dim=256) == "hopper"
    assert family_of(seq=512, variant="full") == "hopper"


def test_of_lengths_as_near_the_group_decides(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = staticmethod(lambda name, workload: 2.0 if (name == "hopper") == (workload.group == 4) else 1.0)
    judge(folder, comparison(), workloads=[LONG, Workload(seq=16384, group=4)])
    assert [family_of(group=group) for group in (1, 4, 8)] == ["hopper", "portable", "portable"]


def test_where_the_rule_held_it_holds_between(folder: Path, made_up: type[MadeUpBench]) -> None:
    """Of lengths between those that were measured it knows more: at 64 columns its forward changes at 1024."""
    ruled = families_of(folder).ruled
    made_up.MS = staticmethod(lambda name, workload: 1.0 if name == ruled(comparison(head_dim=64), workload) else 2.0)
    judge(folder, comparison(head_dim=64), workloads=[SHORT, MIDDLE])
    wanted = {512: "portable", 1000: "portable", 1024: "hopper", 1100: "hopper", 2048: "hopper"}
    assert {seq: family_of(seq=seq, head_dim=64) for seq in wanted} == wanted


def test_wrong_kernels_do_not_run_beside_measured_workloads(folder: Path, made_up: type[MadeUpBench]) -> None:
    """Of 512 keys the rule has dq in a kernel of its own, of 1024 in the one that was wrong."""
    made_up.FAULTS = staticmethod(lambda contender: "wrong" if contender.name == "hopper" else "")
    judge(folder, comparison("bwd"), workloads=[SHORT])
    found = [(family_of("dkdv", seq=seq), family_of("dq", seq=seq)) for seq in (512, 1024)]
    assert found == [("hopper", "portable")] * 2
    assert family_of("dq", seq=1024, gpu="") == "hopper"


def test_examples() -> None:
    assert doctest.testmod(families, raise_on_error=True).attempted > 0


@pytest.mark.usefixtures("made_up")
def test_other_chips_and_modes_are_as_ever(folder: Path) -> None:
    judge(folder, comparison("fwd", "natten"), comparison("bwd", "natten"))
    assert family_of(variant="natten") == "hopper"
    assert family_of(variant="natten", mode="packed") == "portable"
    assert family_of(variant="natten", dtype="float32") == "portable"
    for arch in ("sm_80", "sm_100"):
        given = ("dense", arch, "imaginary_1", "bfloat16", (128, 128), (1, 1), 16384)
        assert {tile.family for tile in configs.tiles_for("natten", *given).values()} == {"portable"}


def broken(change: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update(change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (broken({"kernels": {"fwd": "0123"}}), "its families of fwd were measured on other kernels"),
        (broken({"mode": "packed"}), "its families of packed fwd were measured on other kernels"),
        (broken({"ms": {}}), "are no times of some of portable, hopper_dkdv, hopper"),
        (broken({"ms": {"volta": 1.0}}), "are no times of some of portable, hopper_dkdv, hopper"),
        (broken({"ms": {"hopper": 0.0}}), "are no times of some of"),
        (broken({"ms": 3.0}), "lacks or misspells"),
        (broken({"seq": 0}), "no positive int"),
        (lambda row: row.pop("kernels"), "lacks or misspells 'kernels'"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_unusable_tuned_files_warn_once(folder: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    judge(folder, comparison(variant="natten"), workloads=[LONG])
    path = folder / "natten.json"
    assert family_of(variant="natten") == "hopper"
    document = json.loads(path.read_text())
    change(document["families"][0])
    path.write_text(json.dumps(document))
    tuned.tuned_entries.cache_clear()
    configs.tiles_for.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [family_of(variant="natten", seq=seq) for seq in (512, 16384)] == ["portable", "portable"]
    (message,) = [str(warning.message) for warning in caught]
    assert str(path) in message
    assert reason in message
    assert "codegen tune natten" in message


# ------------------------------------------------------------------------------------------------------------ on a CPU


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are drawn for the CPU, where an op computes its reference."""

    def drawn(*args: Any, **options: Any) -> Any:
        return draw_call(*args, **options | {"device": "cpu"})

    monkeypatch.setattr(measuring, "draw_call", drawn)
    monkeypatch.setattr(measuring, "TOKENS", 64)
    monkeypatch.setattr(measuring, "WIDTH", 32)
    measuring.golden_call.cache_clear()
    measuring.timed_call.cache_clear()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mode", ["packed", "segmented"])
def test_contenders_are_held_against_float64_by_mode(mode: str) -> None:
    of = Comparison(variant="causal", mode=mode, dtype="bfloat16", head_dim=16, pass_="bwd")
    bench = FamilyBench(PACKAGE, of)
    contender = Contender(name="portable", family="portable", tiles=())
    assert bench.check(contender) == ""
    op = bench.op
    bench.op = lambda *args, **options: op(*args, **options | ({"q_segment_ids": None} if mode == "segmented" else {}))
    assert ("off by" in bench.check(contender)) is (mode == "segmented")


@pytest.mark.usefixtures("on_cpu")
def test_timed_calls_have_several_uneven_sequences() -> None:
    found = {
        mode: measuring.timed_call(
            PACKAGE,
            Comparison(variant="causal", mode=mode, dtype="bfloat16", head_dim=16, pass_="fwd").group(Pass.FWD),
            Workload(seq=32, group=1),
        )
        for mode in ("packed", "segmented")
    }
    inputs, sequences = found["packed"]
    lengths = sequences["cu_seqlens_q"].diff().tolist()
    assert sum(lengths) == inputs.q.shape[0] == measuring.DOCUMENTS * 32
    assert 16 <= min(lengths) < 32 < max(lengths) <= 48
    inputs, sequences = found["segmented"]
    (ids,) = sequences["q_segment_ids"]
    assert len(ids) == inputs.q.shape[2] == 8 * 32
    lengths = ids.bincount().tolist()
    assert len(lengths) == 8
    assert 15 <= min(lengths) < 32 < max(lengths) <= 49
    assert ids.diff().min() >= 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_contenders_are_held_against_float64(pass_: str) -> None:
    bench = FamilyBench(PACKAGE, comparison(pass_, "alibi", 16))
    contender = Contender(name="portable", family="portable", tiles=(), seq=96)
    right, op = measuring.golden_call, bench.op
    small = right(PACKAGE, comparison("fwd", "alibi", 16).group(Pass.FWD), 96, (2, 2))
    bench_golden = lambda *_: small  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "golden_output", bench_golden)
        assert bench.check(contender) == ""
        bench.op = lambda *args, **options: 1.1 * op(*args, **options)
        assert "off by" in bench.check(contender)
        bench.op = lambda *_args, **_options: 1 // 0
        assert bench.check(contender).startswith("ZeroDivisionError")


@pytest.mark.usefixtures("on_cpu")
def test_race_times_whole_calls() -> None:
    def sample(call: Callable[[], Any], count: int) -> list[float]:
        results = call()
        return [float(len(results)) if isinstance(results, tuple) else 10.0] * count

    contenders = [
        Contender(name="portable", family="portable", tiles=()),
        Contender(name="hopper", family="portable", tiles=()),  # Hopper's own run on that chip alone
        Contender(name="hopper_dkdv", family="volta", tiles=()),
    ]
    workload = Workload(seq=32, group=1)
    for pass_, ms in (("fwd", 10.0), ("bwd", 4.0)):  # o; the gradients of q, k, v and slope
        with timing.using(timing.Clock(sample=sample)):
            found, failed = FamilyBench(PACKAGE, comparison(pass_, "alibi", 16)).race(contenders, workload)
        assert found == {"portable": ms, "hopper": ms}
        assert "family: expected None or one of" in failed["hopper_dkdv"]


@pytest.mark.usefixtures("on_cpu")
def test_race_reports_inputs_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(measuring, "draw_call", lost)
    contenders = [Contender(name="portable", family="portable", tiles=())]
    found = FamilyBench(PACKAGE, comparison("fwd", "alibi", 16)).race(contenders, Workload(seq=32, group=1))
    assert found == ({}, {"portable": "RuntimeError: CUDA error: an illegal memory access"})


# ------------------------------------------------------------------------------------------------------------ commands


def verdict(ms: dict[str, float], ruled: str, taken: str, **failed: str) -> Verdict:
    return Verdict(workload=LONG, ms=ms, failed=failed, config={}, ruled=ruled, taken=taken)


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
    said = "[1/4] causal bfloat16 D128 fwd, families: 1 of 2 as a rule; "
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
    given |= {"head_dims": [64, 80], "seqs": [512], "modes": [], "minutes": 0.0, "jobs": 1, "families": False}
    given |= {"variants_path": ROOT / "variants.yaml", "out": ROOT / "generated", "again": False}
    return Choice(**given | changes)


@pytest.fixture
def machine(folder: Path, made_up: type[MadeUpBench], monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    """The command finds a GPU that is made up."""
    del folder

    class Bench:
        """Tiles that are all right, and as fast."""

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
    # Hopper's family has no kernel for a head_dim of 80.
    assert "families of 2 forwards and backwards to compare, 0 compared already" in printed
    assert "families: the rule holds in 0 of" in printed
    assert "hopper for portable at seq 512 group 1, 1.11 times as fast" in printed
    measured = tuned.read(folder / "causal.json")
    assert {verdict.problem.head_dim for verdict in measured.verdicts} == {64}
    assert {entry.problem.head_dim for entry in measured.entries} == {64, 80}
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
    """A window that is long or short, and documents that are, have other kernels: the example is one of them."""
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
    # What is compared already needs no time.
    assert budgets == [pytest.approx(0.7 * 60), 60.0]


@pytest.mark.usefixtures("folder")
def test_where_there_is_one_family_the_option_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "this_machine", lambda: Machine(gpu="NVIDIA A100", arch="sm_80", triton="3.6.0"))
    with pytest.raises(CodegenError, match=r"--families: expected .* sm_90, .*; this GPU is NVIDIA A100 \(sm_80\)"):
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
    assert "1 of 2 comparisons are made and written; the same command goes on" in capsys.readouterr().err
    assert {verdict.pass_name for verdict in tuned.read(folder / "causal.json").verdicts} == {"fwd"}
    machine.FAULTS = staticmethod(lambda _: "")
    command.run(wanted)
    assert "families of 1 forwards and backwards to compare, 1 compared already" in capsys.readouterr().out


def explained(capsys: pytest.CaptureFixture[str], variant: str, seq: int) -> str:
    wanted = ["explain", variant, "--gpu", "imaginary_1", "--dtype", "bf16", "--head-dim", "128", "--seq", str(seq)]
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
        f"fwd: portable, as measured, and not as a rule: {place}: portable 1 ms, hopper 1.5 ms, Triton 3.6.0" in printed
    )
    assert f"bwd: hopper with a portable dq, as measured, and not as a rule: {place}: hopper with a portable" in printed
    assert "family: a call's family=, config= or deterministic=, then what was measured nearest" in printed
    made_up.MS = times(portable=1.0, hopper=1.005, hopper_dkdv=1.5)
    made_up.FAULTS = staticmethod(lambda contender: "wrong: dq is off" if contender.name == "hopper_dkdv" else "")
    judge(folder, comparison("fwd"), comparison("bwd"))
    printed = explained(capsys, "causal", 10_000)
    assert f"fwd: hopper, as a rule, which held where it was measured: {place}: portable 1 ms" in printed
    assert "hopper with a portable dq none (wrong: dq is off)" in printed
    assert "natten" not in printed
    assert "could be of the family hopper" in explained(capsys, "natten", 10_000)


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
