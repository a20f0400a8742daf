"""A run of the benchmark: the work before it, cases in turn, time limits, and the results that it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
pytest.importorskip("triton", reason="the benchmark needs Triton")

import torch

from bench import __main__ as command
from bench import record
from bench.cases.case import Case
from bench.options import SPEED, SUITES, parser
from bench.peers.installed import PACKAGES, is_installed, missing
from bench.record import Cost, Measurement, Results
from bench.runs import speed
from bench.timing import first_call
from bench.timing import warm_compile as beforehand
from bench.timing.clock import Clock
from bench.timing.measure import GpuLostError
from codegen.cli.main import _parser as codegen_parser
from codegen.cli.main import main as codegen
from tests.support.measured import CASE, rows_of

# ---------------------------------------------------------------------------------------------------------- beforehand


def test_tuning_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        log.append("mine")
        yield
        log.append("yours")

    monkeypatch.setattr(beforehand, "my_turn", turn)

    def timed(x: int, y: int) -> int:
        log.append("timed")
        return x + y

    assert beforehand.one_at_a_time(timed)(1, y=2) == 3
    assert log == ["mine", "timed", "yours"]
    with beforehand.timed_alone():
        pass  # inductor exists and has the attributes that this changes


def test_triton_caches_where_it_would_without_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    default = knobs.cache.dir
    beforehand.share_caches()
    assert os.environ["TRITON_CACHE_DIR"] == knobs.cache.dir == default


def test_missing_peers_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "fa4", ("no_such_package.cute", "flash-attn-4"))
    assert missing(["flex", "fa4"]) == {"fa4": "flash-attn-4"}
    assert is_installed("torch.nn")


# ----------------------------------------------------------------------------------------------------------------- run


def planned(*names: str) -> speed.Plan:
    cases = [Case(variant=name, shape=CASE.shape) for name in names]
    return speed.Plan(suites={"fa3": [case.name for case in cases]}, cases=cases, missing={"fa4": "flash-attn-4"})


def test_every_case_is_kept_before_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    options = parser().parse_args(["--jobs", "0", "--json", str(path)])
    seen: list[int] = []

    def fake(case: Case, _: float) -> tuple[list[Measurement], list[Cost]]:
        seen.append(len(json.loads(path.read_text())["measurements"]))
        if case.variant == "alibi":
            raise SystemExit
        return rows_of(case), [Cost(case=case.name, implementation="ours", first_s=1.0)]

    monkeypatch.setattr(speed, "measure", fake)
    results = Results(machine={"gpu": "a test"})
    keep = partial(command.keep_results, options, results)
    with pytest.raises(SystemExit):
        speed.run(options, planned("causal", "full", "alibi"), results, keep, Clock())
    assert seen == [0, 4, 8]
    stored = record.load(path)
    assert stored.cases() == [f"{name} {CASE.shape}" for name in ("causal", "full")]
    assert stored.skipped == [f"alibi {CASE.shape}"]
    assert stored == results
    assert [each.name for each in path.parent.iterdir()] == ["r.json"]


def test_stored_run_says_if_kernels_were_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure", lambda case, _: (rows_of(case), []))
    for jobs, left_out, how in (
        ("0", "", "compiling included"),
        ("2", "", "after compiling beforehand into caches on disk"),
        ("2", "as far as there was time", "after compiling beforehand into caches on disk, as far as there was time"),
    ):
        monkeypatch.setattr(speed, "compile_all", lambda *_, left_out=left_out: left_out)
        results = Results()
        speed.run(parser().parse_args(["--jobs", jobs]), planned("causal"), results, lambda: None, Clock())
        assert results.settings["first_call"] == how


def test_no_case_begins_when_time_is_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "measure", lambda case, _: (rows_of(case), []))
    results = Results()
    over = Clock(minutes=1.0, start=time.monotonic() - 61)
    speed.run(parser().parse_args(["--jobs", "0"]), planned("causal"), results, lambda: None, over)
    assert results.skipped == [CASE.name]
    assert "out of time: 1 cases are skipped" in capsys.readouterr().out
    later = Clock(minutes=1.0).at(0.5)
    assert later is not None
    assert 25 < later - time.monotonic() <= 30


def test_a_case_that_crashes_is_wrong_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(case: Case, _: float) -> tuple[list[Measurement], list[Cost]]:
        if case.variant == "causal":
            raise MemoryError("too large")
        return rows_of(case), []

    monkeypatch.setattr(speed, "measure", fake)
    results = Results()
    speed.run(parser().parse_args(["--jobs", "0"]), planned("causal", "full"), results, lambda: None, Clock())
    assert not results.right()
    assert [m.note for m in results.measurements[:3]] == ["MemoryError: too large"] * 2 + [""]


def test_a_suite_that_crashes_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def crash() -> bool:
        ran.append("schedules")
        raise ValueError("broken")

    def run() -> bool:
        ran.append("memory")
        return True

    monkeypatch.setattr("bench.runs.schedules.run", crash)
    monkeypatch.setattr("bench.runs.memory.run", run)
    options = parser().parse_args(["--suite", "schedules,memory"])
    assert not command.run_suites(options, Results(), lambda: None, Clock())
    assert ran == ["schedules", "memory"]
    assert "ValueError: broken" in capsys.readouterr().err


def test_front_runs_its_packed_rows_first_and_keeps_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def packed(_rep: int, _jobs: int, chosen: list[Any], *_: Any) -> bool:
        ran.extend(case.name for case in chosen)
        return True

    def measured(case: Case, _: float) -> Any:
        ran.append(case.name)
        return rows_of(case), []

    monkeypatch.setattr("bench.runs.packed.run", packed)
    monkeypatch.setattr(speed, "measure", measured)
    only = "documents B32|causal B1 H32 S16384|window"
    results = Results()
    options = parser().parse_args(["--suite", "front", "--jobs", "0", "--only", only])
    assert command.run_suites(options, results, lambda: None, Clock())
    window = "window(1024) B1 H32 S16384 D64"
    assert ran == ["documents B32 S4096", "causal B1 H32 S16384 D64", window]
    assert results.settings["block_shares"] == pytest.approx(
        {"causal B1 H32 S16384 D64": 0.9923, window: 0.8889}, abs=1e-4
    )


def test_first_calls_in_torch_are_timed_in_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = first_call.torch_phases("cpu", heads=1, seq=8)
    assert list(seconds)[:4] == ["import torch", "first tensors", "torch's backward", "import causal"]
    assert list(seconds)[4:] == ["first forward", "first backward", "second forward", "second backward"]
    caches: list[str] = []

    def in_process(arguments: list[str], changed: dict[str, str]) -> dict[str, float]:
        assert arguments == ["torch", "one"]
        caches.append(changed["TRITON_CACHE_DIR"])
        return {"first forward": float(len(caches)), "first backward": 2.5}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        parse = codegen_parser().parse_args(command[command.index("warm") :])
        assert (parse.names, parse.heads, parse.seqs, parse.head_dims) == (["causal"], (16, 16), [4096], [(128, 128)])
        caches.append(env["TRITON_CACHE_DIR"])

    monkeypatch.setattr(first_call, "in_process", in_process)
    monkeypatch.setattr("bench.timing.first_call.subprocess.run", run)
    assert first_call.torch_table()
    cold, warm, ahead, after = caches
    assert cold == warm != ahead == after
    *_, forward, _, verdict = capsys.readouterr().out.splitlines()
    assert forward.split() == ["first", "forward", "1.00", "2.00", "4.00"]
    assert verdict.strip() == "first step, cold cache: 3.50 of 4.0 s: OK"
    monkeypatch.setattr(first_call, "FIRST_STEP_BAR_S", 3.0)
    assert not first_call.torch_table()


def test_measurements_survive_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(case: Case, _: float) -> Any:
        raise GpuLostError("gone", rows_of(case)[:1])

    monkeypatch.setattr(speed, "measure", lose)
    results, kept = Results(), []
    with pytest.raises(GpuLostError):
        speed.run(parser().parse_args(["--jobs", "0"]), planned("causal"), results, lambda: kept.append(1), Clock())
    assert (len(results.measurements), results.settings, len(kept)) == (
        1,
        {"first_call": "compiling included", "lost": "gone"},
        2,
    )


# ------------------------------------------------------------------------------------------------------------- command


def test_cases_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert codegen(["bench", "--suite", "fla", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["forgetting", "B1", "H32/8", "S16384", "D128", "fla"]
    assert lines[-1].startswith("6 cases: about ")


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert command.main([*options, "--list"]) == 0
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines


def test_every_suite_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys)
    headings = [line for line in lines if ": " in line]
    assert [line.partition(":")[0] for line in headings[1:]] == [suite for suite in SUITES if suite not in SPEED]
    assert "cases: about" in headings[0]


@pytest.mark.parametrize(
    ("options", "first", "line"),
    [
        (["--suite", "packed"], "packed: ", "documents B32 S4096  packed, segments, fa4, flex"),
        (["--suite", "front", "--only", "^documents B32"], "packed: 1 cases", "documents B32 S4096  packed, segments"),
        (["--suite", "decode,parallel"], "decode: ", "ours causal S131072"),
        (["--suite", "parallel", "--replay", "8", "--only", "causal"], "parallel: 1 cases", "replay causal S131072 P8"),
        (["--suite", "models", "--only", "gemma", "--peers", "flex"], "models: ", ", flex"),
        (["--suite", "jax", "--only", "foo", "--cases", "same,first"], "jax: parts same, first", "jax: "),
        (["--suite", "host", "--only", "foo"], "host: one table", "host: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_selected_cases_of_a_suite_are_listed(
    options: list[str], first: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = listed(capsys, *options)
    assert lines[0].startswith(first)
    assert any(line in each for each in lines)


@pytest.mark.parametrize("suites", ["core", "packed,decode", "models", "parallel"])
def test_a_list_without_a_case_says_so(suites: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--suite", suites, "--only", "zzz", "--list"]) == 1
    message = f"--only matches no case of the suites {suites.replace(',', ', ')}\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("option", ["--json", "--csv", "--plots"])
def test_a_path_that_cannot_be_written_is_refused_before_a_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--plots":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "_measure", lambda options: pytest.fail("measured"))
    file = tmp_path / "file"
    file.touch()
    path = file / "r"
    assert command.main(["--suite", "models", "--quick", option, str(path)]) == 2
    kind = "folder" if option == "--plots" else "file"
    assert capsys.readouterr().err.startswith(f"{option}: expected a {kind} that can be written, got {path}: ")
    assert command.main(["--suite", "models", "--quick", option, str(file if option == "--plots" else tmp_path)]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_help_is_that_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codegen(["bench", "--help"])
    assert "--minutes N" in capsys.readouterr().out


def test_a_run_ends_with_its_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run prints its tables too, and its file is complete."""

    def fake(case: Case, _: float) -> tuple[list[Measurement], list[Cost]]:
        if case.shape.dim == 64:
            raise KeyboardInterrupt
        return rows_of(case), []

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # a build for CUDA would ask for the GPU's
    monkeypatch.setattr(speed, "measure", fake)
    path = tmp_path / "r.json"
    rows = tmp_path / "new" / "folder" / "r.csv"
    argv = ["--suite", "fla", "--jobs", "0", "--json", str(path), "--csv", str(rows)]
    assert command.main(argv) == 130
    assert rows.read_text().startswith("suites,case,which,")
    assert record.load(path).cases() == ["forgetting B1 H32/8 S16384 D128"]
    assert "the project's bars, which are for an H100, on a test" in capsys.readouterr().out
    assert command.main([*argv, "--only", "D128"]) == 0
    assert command.main([*argv, "--only", "nothing"]) == 1
