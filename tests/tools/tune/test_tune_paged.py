"""Tuning the kernels on paged caches with a simulated GPU: the tiles that are tried, chosen, written and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from codegen.arch.chips import ARCHS, CHIPS
from codegen.arch.paged import PagedPass, PagedTileConfig, default_paged_tiles
from codegen.arch.tile_rules import tile_problems
from codegen.cli.main import main
from codegen.compile.packages import Package
from codegen.compile.pool import WorkerDiedError
from codegen.load.spec_file import load
from codegen.testing.calls import load_manifest, load_op
from codegen.testing.paged_calls import PagedShape, draw_paged_call, random_table, seen_whole
from codegen.tune import command, paged, paged_measuring
from codegen.tune.paged import PagedTask, PagedTuner, geometric_mean, paged_hashes, summary
from codegen.tune.paged_space import GROUPS, KEYS_PER_SPLIT, PagedWorkload, tiles, workloads
from codegen.tune.record import Machine, PagedGroup, PagedOutcome, TunedFile
from codegen.tune.tuner import Context
from generated._runtime.core import tuned
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import DEFAULT_SPEC, ROOT

SPEC = load(DEFAULT_SPEC)
MACHINE = Machine(gpu="NVIDIA Imaginary 1", arch="sm_90", triton="3.6.0")
GROUP = PagedGroup(variant="causal", dtype="bfloat16", head_dim=128, group=4, pass_=PagedPass.DECODE)
LEGAL = [name for name, variant in SPEC.variants.items() if not (variant.dropout or variant.decay)]


# --------------------------------------------------------------------------------------------------------------- space


@pytest.mark.parametrize("pass_", list(PagedPass))
@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_are_few_and_legal_and_begin_with_the_default(arch: str, pass_: PagedPass) -> None:
    for itemsize in (2, 4):
        for head_dim in (64, 128, 256):
            default = default_paged_tiles(arch, pass_, itemsize)[head_dim]
            found = tiles(arch, pass_, itemsize, head_dim, default)
            assert found[0] == default
            assert len(found) == len(set(found)) <= 16
            for tile in found:
                fields = {name: getattr(tile, name) for name in ("block_m", "block_n", "num_warps", "num_stages")}
                assert not tile_problems(fields)
                held = (tile.num_stages - 1) * tile.block_n * 2 * head_dim * itemsize
                assert tile == default or held <= CHIPS[arch].shared_memory


def test_workloads_cover_batches_lengths_and_both_kinds_of_page() -> None:
    decode = workloads(PagedPass.DECODE)
    assert {size.batch for size in decode} == {1, 16, 64}
    assert {size.keys for size in decode} == {1024, 8192, 32_768, 131_072}
    assert {size.page_size for size in decode} == {1, 16, 64}
    assert len({str(size) for size in decode}) == len(decode)
    for size in (*decode, *workloads(PagedPass.PAGED_FWD)):
        assert size.keys % size.page_size == 0


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.skipif(INTERPRET, reason="on the CPU the plain reference is wanted")
@pytest.mark.parametrize("variant", LEGAL)
def test_drawn_calls_have_finite_results(variant: str) -> None:
    shape = PagedShape(lengths=(70, 1, 0), queries=1, group=3, kv_heads=2, head_dim=16, page_size=16)
    call = draw_paged_call(SPEC.variants[variant], shape, "bfloat16", "cpu")
    o, lse = call.plain().call(load_op(variant), return_lse=True)
    assert o.dtype == torch.float32
    assert torch.isfinite(o).all()
    assert not torch.isnan(lse).any()
    assert o[0].abs().max() > 0


def test_tables_name_each_page_once() -> None:
    shape = PagedShape(lengths=(70, 1, 0), queries=1, group=3, kv_heads=2, head_dim=16, page_size=16)
    table = random_table(shape, shape.pages, "cpu")
    assert sorted(table.flatten().tolist()) == list(range(15))


def test_timed_masks_keep_as_much_as_they_may() -> None:
    length, seen = SPEC.variants["padding"].tensors["length"], SPEC.variants["document"].tensors["doc"]
    assert seen_whole(length, (2,), most=9, device="cpu").tolist() == [9, 9]
    assert seen_whole(seen, (2, 4), most=9, device="cpu").unique().tolist() == [0]


# --------------------------------------------------------------------------------------------------------------- tuner


class MadeUpBench:
    """Kernels that take the milliseconds of `MS`, and fail with the faults of `FAULTS`."""

    MS: Callable[[PagedTileConfig, PagedWorkload], float]
    FAULTS: Callable[[PagedTileConfig], str]
    timed: ClassVar[list[PagedTileConfig]]

    def __init__(self, *_: object) -> None:
        pass

    def fits(self, workload: PagedWorkload) -> bool:
        return workload.batch < 64

    def check(self, tile: PagedTileConfig) -> str:
        return type(self).FAULTS(tile)

    def time(self, tile: PagedTileConfig, workload: PagedWorkload) -> float:
        assert workload.batch < 64
        type(self).timed.append(tile)
        return type(self).MS(tile, workload)


class DoneAtOnce:
    """A pool that compiles nothing: a kernel of six stages crashes the compiler."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, task: PagedTask) -> Future[str]:
        done: Future[str] = Future()
        if task.tile.num_stages == 6:
            done.set_exception(WorkerDiedError("signal 11"))
        else:
            done.set_result("CompilationError: no" if task.tile.num_stages == 5 else "")
        return done

    def __enter__(self) -> DoneAtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    class Bench(MadeUpBench):
        MS = staticmethod(lambda tile, size: size.keys / (tile.block_n + tile.keys_per_split / 1000))
        FAULTS = staticmethod(lambda _: "")
        timed: ClassVar[list[PagedTileConfig]] = []

    monkeypatch.setattr(paged_measuring, "PagedBench", Bench)
    monkeypatch.setattr(paged, "Pool", DoneAtOnce)
    return Bench


def context(folder: Path) -> Context:
    return Context(spec=SPEC, package=Package(root=str(ROOT), name="generated"), folder=folder, machine=MACHINE)


def tune(folder: Path, deadline: float = float("inf")) -> tuple[list[PagedOutcome], list[PagedGroup]]:
    outcomes: list[PagedOutcome] = []
    left = PagedTuner(context(folder), 1, deadline, outcomes.append, lambda _: None).run([GROUP])
    return outcomes, left


def path_in(folder: Path) -> Path:
    return folder / "tuned" / "imaginary_1" / "causal.json"


def test_the_tile_with_the_best_mean_is_taken_then_its_splits(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    (outcome,), left = tune(tmp_path)
    assert not left
    assert outcome.tile is not None
    assert (outcome.tile.block_n, outcome.tile.keys_per_split) == (128, max(KEYS_PER_SPLIT))
    assert {reason.split(":")[0] for reason in outcome.failed.values()} == {"CompilationError", "the compiler crashed"}
    assert set(outcome.times) == {str(size) for size in workloads(PagedPass.DECODE) if size.batch < 64}
    assert outcome.ms == pytest.approx(geometric_mean(list(outcome.times.values())))
    # Splits were tried only with the fastest tile.
    others = {tile for tile in made_up.timed if tile.keys_per_split != 128}
    assert {replace(tile, keys_per_split=128) for tile in others} == {replace(outcome.tile, keys_per_split=128)}


def test_wrong_tiles_are_not_taken_and_hopeless_ones_not_timed_to_the_end(
    tmp_path: Path, made_up: type[MadeUpBench]
) -> None:
    made_up.FAULTS = staticmethod(lambda tile: "wrong: o is off by 1e-1" if tile.block_n == 128 else "")
    made_up.MS = staticmethod(lambda tile, _: 1.0 if tile.block_n == 64 else 9.0)
    (outcome,), _ = tune(tmp_path)
    assert outcome.tile == default_paged_tiles("sm_90", PagedPass.DECODE, 2)[128]
    assert [reason for tile, reason in outcome.failed.items() if tile.block_n == 128] == ["wrong: o is off by 1e-1"] * 2
    slow = [tile for tile in made_up.timed if tile.block_n == 32]
    assert len(slow) == len(set(slow)) > 0


def test_the_default_stays_where_nothing_is_clearly_faster(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = staticmethod(lambda tile, _: 1.0 - tile.block_n / 1e5)
    (outcome,), _ = tune(tmp_path)
    assert outcome.tile == default_paged_tiles("sm_90", PagedPass.DECODE, 2)[128]
    assert outcome.ms == outcome.default_ms
    assert summary(outcome).startswith("1.00 times as fast as the default; 16x64 w4 s3, 128 keys a split at least")


def test_no_tile_is_right(tmp_path: Path, made_up: type[MadeUpBench]) -> None:
    made_up.FAULTS = staticmethod(lambda _: "wrong")
    (outcome,), _ = tune(tmp_path)
    assert outcome.tile is None
    assert summary(outcome) == "no tile works: wrong"
    document = json.loads(path_in(tmp_path).read_text())
    assert "paged" not in document
    assert {row["reason"] for row in document["paged_failed"]} >= {"wrong"}


@pytest.mark.usefixtures("made_up")
def test_a_file_is_read_back_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (outcome,), _ = tune(tmp_path)
    hashes = paged_hashes(context(tmp_path), GROUP)
    (entry,) = tuned.read(path_in(tmp_path)).paged
    assert outcome.tile is not None
    assert entry.tile._asdict() == vars(outcome.tile)
    assert (entry.pass_name, entry.kernels, entry.triton) == ("decode", hashes, "3.6.0")
    assert tuned.is_fresh("causal", entry)
    file = TunedFile(path_in(tmp_path), MACHINE)
    assert file.has_paged(GROUP, hashes)
    assert not file.has_paged(replace(GROUP, group=8), hashes)
    assert not file.has_paged(GROUP, {**hashes, "fwd": "other"})
    before = file.text()
    tune(tmp_path)
    assert TunedFile(path_in(tmp_path), MACHINE).text() == before


@pytest.mark.usefixtures("made_up")
def test_a_budget_leaves_groups_out(tmp_path: Path) -> None:
    outcomes, left = tune(tmp_path, deadline=0.0)
    assert (outcomes, left) == ([], [GROUP])
    assert not path_in(tmp_path).exists()


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.skipif(INTERPRET, reason="on the CPU the plain reference is wanted")
@pytest.mark.parametrize("pass_", list(PagedPass))
@pytest.mark.parametrize("variant", ["gpt_oss", "padding"])
def test_calls_are_checked_and_timed(variant: str, pass_: PagedPass, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU an op computes its reference: the arguments must be valid, and the results are right."""
    lasted: list[int] = []

    def graph_time(series: Callable[[], None]) -> float:
        series()
        lasted.append(1)
        return 6.0

    monkeypatch.setattr(paged_measuring, "DEVICE", "cpu")
    monkeypatch.setattr(paged_measuring, "MOST_CALLS", 3)
    monkeypatch.setattr(paged_measuring, "graph_time", graph_time)
    group = replace(GROUP, variant=variant, pass_=pass_, head_dim=16)
    bench = paged_measuring.PagedBench(Package(root=str(ROOT), name="generated"), SPEC.variants[variant], group)
    tile = default_paged_tiles("sm_90", pass_, 2)[64]
    assert bench.check(tile) == ""
    assert bench.time(tile, PagedWorkload(batch=2, keys=128, queries=2, page_size=16)) == 2.0
    assert lasted == [1]
    wrong, _ = bench._golden(16)
    bench._goldens[16] = wrong, {name: x + 1 for name, x in bench._goldens[16][1].items()}
    assert bench.check(tile).startswith("wrong: ")


@pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")
def test_candidates_are_compiled_without_a_gpu() -> None:
    tile = default_paged_tiles("sm_90", PagedPass.DECODE, 2)[128]
    task = PagedTask(
        package=Package(root=str(ROOT), name="generated"),
        arch="sm_90",
        variant=SPEC.variants["causal"],
        group=GROUP,
        tile=tile,
    )
    assert paged.compile_paged(task) == ""


# ------------------------------------------------------------------------------------------------------------- command


def choice(**changes: Any) -> command.Choice:
    given: dict[str, Any] = {
        "variants_path": DEFAULT_SPEC,
        "out": ROOT / "generated",
        "variants": ["causal", "causal_dropout"],
        "passes": [],
        "dtypes": [],
        "head_dims": [128],
        "seqs": [],
        "modes": [],
        "minutes": 0.0,
        "jobs": 1,
        "families": False,
        "again": False,
    }
    return command.Choice(**given | changes)


def test_passes_on_paged_caches_are_tuned_where_they_are_named() -> None:
    manifest = load_manifest()
    named = choice(passes=["decode", "paged_fwd"])
    groups = command._paged_groups(named, SPEC, manifest)
    assert {group.variant for group in groups} == {"causal"}
    assert {(group.pass_, group.group) for group in groups} == {(p, group) for p in PagedPass for group in GROUPS}
    assert {group.dtype for group in groups} == {"bfloat16", "float16"}
    assert command._groups(named, manifest) == []
    assert command._paged_groups(choice(), SPEC, manifest) == []
    assert command._paged_groups(choice(passes=["fwd"]), SPEC, manifest) == []


def test_an_unknown_pass_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "this_machine", lambda: MACHINE)
    assert main(["tune", "causal", "--passes", "decod"]) == 2
    assert "--passes: expected one of fwd, dkdv, dq, decode, paged_fwd, got 'decod'" in capsys.readouterr().err
