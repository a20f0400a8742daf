"""The tuner with a simulated GPU: the tiles that it tries, chooses and writes; and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from codegen.arch.chips import ARCHS
from codegen.arch.tile_rules import TileConfig
from codegen.cli import main as cli
from codegen.compile.packages import Package
from codegen.compile.pool import WorkerDiedError
from codegen.load.spec_file import load
from codegen.render.files import write_atomically
from codegen.spec.model import Pass
from codegen.tune import tuner as tuner_module
from codegen.tune.compiling import SMALL_HEADS, WHOLE_SEQ, Compilation, Compilers, Task, fault_of, whole_heads
from codegen.tune.progress import Progress, gain, totals
from codegen.tune.record import Group, Machine, Outcome, TunedFile, Winner, Workload
from codegen.tune.space import Kernel, Work, candidates, fits, shared_bytes
from codegen.tune.tuner import Context, Request, Tuner
from codegen.util.errors import CodegenError
from generated._runtime.core import head_groups, tuned
from tests.support.inline_pool import InlinePool
from tests.support.paths import DEFAULT_SPEC, ROOT
from tests.support.tuned_files import HASH, path_in, tile

SPEC = load(DEFAULT_SPEC)
MACHINE = Machine(gpu="NVIDIA Imaginary 1", arch="sm_90", triton="3.6.0")
GROUP = Group(variant="causal", mode="dense", dtype="bfloat16", head_dim=128, pass_=Pass.FWD)
LONG = Workload(seq=16384, group=1)
SHORT = Workload(seq=512, group=1)
WORK = Work(multiprocessors=132, visited=lambda _m, _n: 1.0, programs=lambda m, _n: 16384 // m * 16)


# --------------------------------------------------------------------------------------------------------------- space


@pytest.mark.parametrize(
    ("pass_", "config", "wanted"),
    [  # what Triton 3.6 reports for these kernels on sm_90
        (Pass.FWD, tile(128, 64, 4, 3), 131072),
        (Pass.FWD, tile(128, 128, 8, 2), 163840),
        (Pass.DKDV, tile(64, 128, 8, 2), 131584),
        (Pass.DQ, tile(128, 64, 8, 2), 131072),
    ],
)
def test_the_model_of_shared_memory(pass_: Pass, config: TileConfig, wanted: int) -> None:
    kernel = Kernel(pass_=pass_, arch="sm_90", itemsize=2, head_dim=128)
    assert shared_bytes(kernel, config) == wanted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_", list(Pass))
def test_candidates_begin_with_what_is_known_and_fit(arch: str, pass_: Pass) -> None:
    kernel = Kernel(pass_=pass_, arch=arch, itemsize=2, head_dim=128)
    default = SPEC.archs[arch].half[pass_][128]
    found = candidates(kernel, [SPEC.archs[arch]], [default], WORK)
    assert found[0] == default
    assert len(found) == len(set(found))
    known = {default, *(passes[pass_][128] for passes in SPEC.archs[arch].short.values() if 128 in passes[pass_])}
    assert all(fits(kernel, each) for each in found if each not in known)


def test_the_model_prefers_what_an_h100_does() -> None:
    """128 x 128 with eight warps, the fastest tile of sweeps, is among the first that a small budget tries."""
    kernel = Kernel(pass_=Pass.FWD, arch="sm_90", itemsize=2, head_dim=128)
    found = candidates(kernel, [SPEC.archs["sm_90"]], [], WORK)
    known = len(list(SPEC.archs["sm_90"].short)) + 1
    assert tile(128, 128, 8, 2) in found[: known + 12]


# --------------------------------------------------------------------------------------------------------------- tuner


class MadeUpBench:
    """Kernels that take the milliseconds of `MS`, and fail with the faults of `FAULTS`."""

    MS: Callable[[TileConfig, Workload], float]
    FAULTS: Callable[[TileConfig, int], str]

    def __init__(self, _package: Package, group: Group) -> None:
        self.group = group

    def check(self, config: TileConfig, seq: int) -> str:
        return type(self).FAULTS(config, seq)

    def time(self, config: TileConfig, workload: Workload) -> float:
        return type(self).MS(config, workload)

    def duel(self, tiles: Sequence[TileConfig], workload: Workload) -> list[float]:
        return [self.time(config, workload) for config in tiles]


def fault(task: Task) -> str:
    return "CompilationError: no" if task.tile.block_n == 256 else ""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    class Bench(MadeUpBench):
        MS = staticmethod(lambda config, workload: workload.seq / config.block_m)
        FAULTS = staticmethod(lambda _config, _seq: "")

    monkeypatch.setattr(tuner_module, "Bench", Bench)
    monkeypatch.setattr(tuner_module, "Compilers", lambda _jobs: InlinePool(fault))
    monkeypatch.setattr(tuner_module, "multiprocessors", lambda: 132)
    return Bench


def tune(folder: Path, groups: Sequence[Group] = (GROUP,), budget: float | None = None) -> tuple[list[Outcome], Any]:
    context = Context(spec=SPEC, package=Package(root=str(ROOT), name="generated"), folder=folder, machine=MACHINE)
    request = Request(groups=groups, workloads=[SHORT, LONG], budget=budget, jobs=2)
    outcomes: list[Outcome] = []
    left = Tuner(context, request, outcomes.append, lambda _: None).run()
    return outcomes, left


def test_the_fastest_right_tile_is_taken(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda config, _: "wrong: o is off by 1e-1" if config.block_m == 256 else "")
    (outcome,), left = tune(tmp_path)
    assert not left
    assert [winner.tile.block_m for winner in outcome.winners] == [128, 128]
    assert {each.block_m for each in outcome.failed} >= {256}
    name, entries, *_ = tuned.read(path_in(tmp_path))
    assert name == MACHINE.gpu
    assert [(entry.problem.seq, entry.kernel) for entry in entries] == [(512, HASH), (16384, HASH)]
    document = json.loads(path_in(tmp_path).read_text())
    assert all("wrong" in row["reason"] or "CompilationError" in row["reason"] for row in document["failed"])


def test_tiles_that_are_wrong_on_cut_blocks_do_not_win(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda config, seq: "wrong" if config.block_m >= 128 and seq % 128 else "")
    (outcome,), _ = tune(tmp_path)
    assert {winner.tile.block_m for winner in outcome.winners} == {64}


def test_the_default_stays_where_nothing_is_faster(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = staticmethod(lambda config, _: 1.0 if config == tile(128, 128, 8, 3) else 0.995)
    (outcome,), _ = tune(tmp_path)
    assert outcome.winners[1].tile == tile(128, 128, 8, 3)  # the gain is smaller than noise
    assert all((ratio := gain(winner)) and ratio >= 1 for winner in outcome.winners)
    assert "1.000 times" in totals([outcome])


def test_a_default_that_does_not_run_is_said(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda config, _: "OutOfResources" if config == tile(128, 128, 8, 3) else "")
    (outcome,), _ = tune(tmp_path)
    assert [winner.default_ms is None for winner in outcome.winners] == [False, True]


def test_no_right_tile_writes_none(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda *_: "wrong")
    (outcome,), _ = tune(tmp_path)
    assert not outcome.winners
    assert not tuned.read(path_in(tmp_path)).entries


@pytest.mark.usefixtures("made_up")
def test_tuner_tries_the_winners_of_others_first(tmp_path: Path) -> None:
    tune(tmp_path)
    context = Context(spec=SPEC, package=Package(root=str(ROOT), name="generated"), folder=tmp_path, machine=MACHINE)
    request = Request(groups=[GROUP], workloads=[LONG], budget=1.0, jobs=1)
    second = Tuner(context, request, lambda _: None, lambda _: None)
    won = tuned.read(path_in(tmp_path)).entries[0].tile
    other = Group(variant="alibi", mode="dense", dtype="float16", head_dim=128, pass_=Pass.FWD)
    assert TileConfig(**won._asdict()) in second._candidates(other, [context.default(other, LONG)])


@pytest.mark.usefixtures("made_up")
def test_a_budget_leaves_the_rest(tmp_path: Path) -> None:
    outcomes, left = tune(tmp_path, budget=0.0)
    assert (outcomes, left) == ([], [GROUP])


@pytest.mark.usefixtures("made_up")
def test_tuner_skips_tuned_kernels(tmp_path: Path) -> None:
    file = TunedFile(path_in(tmp_path), MACHINE)
    assert not file.has(GROUP, HASH, [LONG])
    tune(tmp_path)
    file = TunedFile(path_in(tmp_path), MACHINE)
    assert file.has(GROUP, HASH, [SHORT, LONG])
    assert not file.has(GROUP, "another", [LONG])
    assert not file.has(GROUP, HASH, [Workload(seq=16384, group=4)])
    assert not TunedFile(path_in(tmp_path), Machine(gpu="other", arch="sm_90", triton="3.6.0")).has(GROUP, HASH, [LONG])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<<<<<<< HEAD", "Expecting value"),
        ("[]", "list indices must be integers"),
        ('{"format": 1}', "it lacks 'gpu'"),
        (f'{{"format": 1, "gpu": "{MACHINE.gpu}", "entries": [{{}}], "failed": []}}', "it lacks 'pass'"),
        (f'{{"format": 1, "gpu": "{MACHINE.gpu}", "entries": 5, "failed": []}}', "'int' object is not iterable"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_overwritten(text: str, reason: str, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(CodegenError, match=f"cannot be read: {reason}.*; repair the file, or delete it"):
        TunedFile(path, MACHINE)
    assert path.read_text() == text


def test_candidates_are_compiled_in_other_processes() -> None:
    group = Group(variant="document", mode="packed", dtype="bfloat16", head_dim=64, pass_=Pass.DQ)
    package = Package(root=str(ROOT), name="generated")
    tasks = [Task(package=package, arch="sm_90", group=group, tile=tile(64, 64, 4), seq=seq) for seq in (1000, 1024)]
    with Compilers(1) as compilers:
        futures = [compilers.submit(task) for task in (*tasks, tasks[0])]
        assert [fault_of(future) for future in futures] == ["", "", ""]
        assert futures[0] is futures[2]
        assert len(compilers.finished()) == 2


def test_a_compiler_that_crashes_costs_its_own_tile() -> None:
    dead: Future[Compilation] = Future()
    dead.set_exception(WorkerDiedError("Assertion `false' failed."))
    assert fault_of(dead) == "the compiler crashed: Assertion `false' failed."


def test_an_interrupted_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "causal.json"
    write_atomically(path, "whole")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "other")
    assert path.read_text() == "whole"
    assert [each.name for each in path.parent.iterdir()] == ["causal.json"]


def test_small_calls_split_no_heads() -> None:
    """Timed calls have enough blocks of keys without groups of query heads; the calls that stand for them do not."""
    small = SMALL_HEADS[1], SMALL_HEADS[0], WHOLE_SEQ, WORK.multiprocessors
    with whole_heads(Package(root=str(ROOT), name="generated")):
        assert head_groups.choose_number(*small) == 1
    assert head_groups.choose_number(*small) > 1


def test_progress_says_what_was_gained(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2)
    winners = [Winner(workload=LONG, tile=tile(128, 64), ms=2.0, default_ms=3.0)]
    progress.report(Outcome(group=GROUP, winners=winners, failed={tile(256, 256): "OutOfResources"}))
    progress.report(Outcome(group=GROUP, winners=[], failed={tile(256, 256): "OutOfResources"}))
    printed = capsys.readouterr().out
    assert "[1/2] causal bfloat16 D128 fwd: 1.50 to 1.50 times" in printed
    assert "128x64 w8 s2, 1 tiles failed" in printed
    assert "no tile works: OutOfResources" in printed


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "causal"], "torch finds no GPU here"),
        (["tune", "--out", "nowhere"], "no generated package there"),
        (["explain", "causl", "--gpu", "h100"], "did you mean 'causal'"),
        (["explain", "--gpu", "gtx_1080"], "no tuned files there"),
        (["explain", "causal", "--gpu", "h10"], "did you mean 'h100'"),
        (["explain", "causal", "--gpu", "h100", "--dtype", "int8"], "--dtype: expected one of float16"),
        (["explain", "causal", "--gpu", "h100", "--head-dim", "600"], "--head-dim: expected 8 to 512, got 600"),
        (["explain", "causal", "--gpu", "h100", "--mode", "paked"], "did you mean 'packed'"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments) == cli.EXIT_ERROR
    assert message in capsys.readouterr().err


def test_explain_shows_the_choice_of_each_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    wanted = ["explain", "causal", "--gpu", "sm_80", "--dtype", "bf16", "--head-dim", "128", "--seq", "16384"]
    assert cli.main(wanted) == cli.EXIT_OK
    printed = capsys.readouterr().out
    assert "causal on sm_80: dense bfloat16 head_dim 128 group 1 seq 16384" in printed
    default = SPEC.archs["sm_80"].half[Pass.FWD][128]
    assert f"fwd   portable  {default.block_m:<7}  {default.block_n:<7}" in printed
    assert printed.count("default of sm_80") == 5, "three passes, and two on paged caches"
    assert "not of the family hopper: its kernels run on sm_90, not on sm_80" in printed


def test_explain_shows_the_family(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variant, said in (
        ("causal", "fwd   hopper  128      128"),
        ("natten", "family='hopper'; the default rule expects no gain"),
    ):
        wanted = ["explain", variant, "--gpu", "sm_90", "--dtype", "bf16", "--head-dim", "128", "--seq", "16384"]
        assert cli.main(wanted) == cli.EXIT_OK
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_explain_without_a_name_shows_what_was_gained(
    gpu: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["explain", "--gpu", gpu]) == cli.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    tuned = sorted(path.stem for path in (ROOT / "generated" / "tuned").glob(f"*{gpu}*/*.json"))
    assert [line.split()[0] for line in lines[3:-1]] == tuned
    # "-": a pass without a tuned entry.
    assert all(float(mean) >= 1 for line in lines[3:] for mean in line.split()[1:5] if mean != "-")
