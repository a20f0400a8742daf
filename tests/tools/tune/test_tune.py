"""The tuner with a GPU that is made up: what it tries, what it takes, what it writes; and how the package reads it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from codegen.tune.compiling import Compilation, Compilers, Task, fault_of
from codegen.tune.progress import Progress, gain, totals
from codegen.tune.record import Group, Machine, Outcome, TunedFile, Winner, Workload
from codegen.tune.space import Kernel, Work, candidates, fits, shared_bytes
from codegen.tune.tuner import Context, Request, Tuner
from generated._runtime import kernels
from generated._runtime.core import configs, tuned
from generated._runtime.core.options import checked_options
from tests.support.inline_pool import InlinePool
from tests.support.paths import DEFAULT_SPEC, ROOT

SPEC = load(DEFAULT_SPEC)
MACHINE = Machine(gpu="NVIDIA Imaginary 1", arch="sm_90", triton="3.6.0")
GROUP = Group(variant="causal", mode="dense", dtype="bfloat16", head_dim=128, pass_=Pass.FWD)
LONG = Workload(seq=16384, group=1)
SHORT = Workload(seq=512, group=1)
HASH = kernels.KERNEL_HASHES["causal"]["dense"]["fwd"]


def tile(block_m: int, block_n: int, num_warps: int = 8, num_stages: int = 2) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


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
    """128 x 128 with eight warps, the fastest of sweeps, is among the first that a small budget tries."""
    kernel = Kernel(pass_=Pass.FWD, arch="sm_90", itemsize=2, head_dim=128)
    found = candidates(kernel, [SPEC.archs["sm_90"]], [], WORK)
    known = len(list(SPEC.archs["sm_90"].short)) + 1
    assert tile(128, 128, 8, 2) in found[: known + 12]


# --------------------------------------------------------------------------------------------------------------- tuner


class MadeUpBench:
    """Kernels that take what `MS` says, and fail as `FAULTS` says."""

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


def path_in(folder: Path) -> Path:
    return folder / "tuned" / "imaginary_1" / "causal.json"


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
    assert outcome.winners[1].tile == tile(128, 128, 8, 3)  # the gain is below what noise is
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


def test_progress_says_what_was_gained(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2)
    winners = [Winner(workload=LONG, tile=tile(128, 64), ms=2.0, default_ms=3.0)]
    progress.report(Outcome(group=GROUP, winners=winners, failed={tile(256, 256): "OutOfResources"}))
    progress.report(Outcome(group=GROUP, winners=[], failed={tile(256, 256): "OutOfResources"}))
    printed = capsys.readouterr().out
    assert "[1/2] causal bfloat16 D128 fwd: 1.50 to 1.50 times" in printed
    assert "128x64 w8 s2, 1 tiles failed" in printed
    assert "no tile is right: OutOfResources" in printed


# --------------------------------------------------------------------------------------------------------- the package


def problem(**changes: Any) -> Any:
    return tuned.Problem("dense", "bfloat16", 128, 1, 16384)._replace(**changes)


def write(folder: Path, **changes: Any) -> Path:
    """A tuned file of `causal` with one entry, some of its fields changed."""
    entry = {"pass": "fwd", "mode": "dense", "dtype": "bfloat16", "head_dim": 128, "seq": 16384, "group": 1}
    entry |= {"config": tile(64, 64, 4, 3).__dict__, "ms": 1.0, "default_ms": 2.0, "kernel": HASH, "triton": "3.6.0"}
    document = {"format": 1, "variant": "causal", "gpu": "NVIDIA Imaginary 1", "arch": "sm_90", "failed": []}
    document["entries"] = [entry | {name: value for name, value in changes.items() if name in entry}]
    document |= {name: value for name, value in changes.items() if name not in entry}
    path = path_in(folder)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose tuned files the package reads."""
    monkeypatch.setattr(tuned, "tuned_path", lambda gpu, variant: tmp_path / "tuned" / gpu / f"{variant}.json")
    tuned.tuned_entries.cache_clear()
    yield tmp_path
    tuned.tuned_entries.cache_clear()


def chosen(asked: Any, config: Any = None) -> dict[str, Any]:
    options = checked_options("causal", config)
    return configs.ladder("causal", "sm_90", "imaginary_1", asked, options)


def test_the_ladder(package: Path) -> None:
    write(package)
    choices = chosen(problem())
    assert {name: choice.source for name, choice in choices.items()} == {
        "fwd": "tuned",
        "dkdv": "default",
        "dq": "default",
    }
    assert choices["fwd"].tile == (64, 64, 4, 3)
    assert chosen(problem(), {"fwd": configs.Tile(32, 32, 4, 1)._asdict()})["fwd"] == ((32, 32, 4, 1), "config", None)
    for other in ({"dtype": "float32"}, {"mode": "packed"}, {"head_dim": 64}):
        assert chosen(problem(**other))["fwd"].source == "default"
    assert chosen(problem(head_dim=100, seq=700, group=8))["fwd"].source == "tuned"


def test_the_other_16_bit_dtype_stands_in_until_a_dtype_is_tuned(package: Path) -> None:
    path = write(package)
    assert chosen(problem(dtype="float16"))["fwd"].tile.block_m == 64
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    document["entries"].append(entry | {"dtype": "float16", "seq": 512, "config": tile(32, 32, 4, 2).__dict__})
    path.write_text(json.dumps(document))
    tuned.tuned_entries.cache_clear()
    assert chosen(problem(dtype="float16"))["fwd"].tile.block_m == 32
    assert chosen(problem())["fwd"].tile.block_m == 64


def test_the_nearest_length_counts_before_the_group(package: Path) -> None:
    path = write(package)
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    document["entries"].append(entry | {"seq": 2048, "group": 4, "config": tile(32, 32, 4, 2).__dict__})
    path.write_text(json.dumps(document))
    assert chosen(problem(seq=3000))["fwd"].tile.block_m == 32
    assert chosen(problem(seq=100_000, group=4))["fwd"].tile.block_m == 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernel": "0123"}, "its fwd were measured on other kernels"),
        ({"gpu": "NVIDIA H200"}, "it was made on NVIDIA H200"),
        ({"format": 7}, "its format is 7"),
        ({"config": {"block_m": 64}}, "lacks or misspells"),
        ({"seq": 0}, "no positive int"),
        ({"entries": 5}, "lacks or misspells"),
    ],
)
def test_unusable_tuned_files_warn_once(package: Path, changes: dict[str, Any], reason: str) -> None:
    path = write(package, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sources = [chosen(problem(seq=seq))["fwd"].source for seq in (512, 16384)]
    assert sources == ["default", "default"]
    (message,) = [str(warning.message) for warning in caught]
    assert str(path) in message
    assert reason in message
    assert "codegen tune causal" in message


def test_a_file_that_is_no_json_is_ignored_aloud(package: Path) -> None:
    write(package).write_text('{"format": 1, "gpu"')
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert chosen(problem())["fwd"].source == "default"


def test_a_gpu_without_files_is_no_warning(package: Path, recwarn: pytest.WarningsRecorder) -> None:
    del package
    assert chosen(problem())["fwd"].source == "default"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_the_folder_of_a_gpu(name: str, key: str) -> None:
    assert tuned.gpu_key(name) == key


@pytest.mark.parametrize("path", sorted((ROOT / "generated" / "tuned").glob("*/*.json")), ids=lambda p: p.stem)
def test_tuned_files_are_sound(path: Path) -> None:
    name, entries, verdicts, _ = tuned.read(path)
    assert tuned.gpu_key(name) == path.parent.name
    assert path.stem in SPEC.variants
    assert entries or verdicts
    for entry in entries:
        assert entry.pass_name in configs.PASSES
        assert entry.default_ms is None or entry.ms <= entry.default_ms
    for verdict in verdicts:
        wanted = configs.PASSES[:1] if verdict.pass_name == "fwd" else configs.PASSES[1:]
        assert verdict.pass_name in ("fwd", "bwd")
        assert set(wanted) < verdict.kernels.keys()
        assert not verdict.ms.keys() & verdict.failed.keys()


def test_check_notes_what_was_measured_on_other_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("variants: {mine: {mask: causal}}")
    wanted = ["--variants", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "stale_ops")]
    assert cli.main(["render", *wanted]) == cli.EXIT_OK
    folder = tmp_path / "stale_ops" / "tuned" / "imaginary_1"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = ROOT / "generated" / "tuned" / "h100" / "causal.json"
    (folder / "mine.json").write_text(source.read_text())
    assert cli.main(["check", *wanted]) == cli.EXIT_OK
    old = "dkdv, dq, fwd, families of bwd, families of fwd"
    assert f"note: tuned/imaginary_1/mine.json: {old} measured on other kernels" in capsys.readouterr().out
    (folder / "mine.json").write_text("{")
    assert cli.main(["check", *wanted]) == cli.EXIT_OK
    assert "note: tuned/imaginary_1/mine.json: cannot be read" in capsys.readouterr().out
    assert cli.main(["explain", "--gpu", "imaginary_1", *wanted]) == cli.EXIT_ERROR
    assert "mine.json: cannot be read" in capsys.readouterr().err


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
        ("natten", "family='hopper', but as a rule is not faster"),
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
    # "-": a pass of which nothing is tuned.
    assert all(float(mean) >= 1 for line in lines[3:] for mean in line.split()[1:5] if mean != "-")
