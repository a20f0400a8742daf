"""The output of the benchmark: files, tables, bars and plots."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch", reason="the benchmark needs torch")

from bench import __main__ as command
from bench import record
from bench.record import Results
from bench.report import targets as bars
from bench.report.tables import computed_shares, report
from tests.support.measured import changed, some_results

STORED = sorted((ROOT / "bench" / "results").glob("*/*.json"))


# --------------------------------------------------------------------------------------------------------------- files


def test_a_failed_write_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record.save(path, some_results())
    before = path.read_text()

    def full(*_: Any, **__: Any) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        record.save(path, Results())
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    results = some_results()
    results.others["packed"] = [{"case": "documents"}]
    record.save(tmp_path / "r.json", results)
    assert record.load(tmp_path / "r.json") == results


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}'])
def test_a_file_that_is_no_run_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"r\.json: not a run that bench stored"):
        record.load(tmp_path / "r.json")


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_stored_runs_stay_readable(path: Path) -> None:
    results = record.load(path)
    assert results.measurements or results.others
    assert all(record.parse_name(m.case) for m in results.measurements)
    assert list(results.panels()) or not results.measurements
    assert max(map(len, report(results).splitlines())) <= 120


def test_shares_of_causal_count_all_scores_of_computed_blocks() -> None:
    results = some_results()
    (causal,) = results.suites["fa3"]
    window = causal.replace("causal", "window(64)")
    # The window runs at 0.3 of causal's rate, and the mask leaves out about half of the scores that it computes.
    results.measurements += changed(results, "causal", "window(64)", 0.3)
    assert computed_shares(results) == {}
    results.settings["block_shares"] = {causal: 0.9, window: 0.45}
    assert {which: share for which, (_, share) in computed_shares(results)[window].items()} == pytest.approx(
        {"fwd": 0.6, "bwd": 0.6}
    )
    assert causal not in computed_shares(results)
    assert "60%" in report(results)


def test_csv_has_all_of_a_measurement_in_a_line(tmp_path: Path) -> None:
    record.write_csv(tmp_path / "r.csv", some_results())
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 7
    assert lines[2]["ratio"] == "1.5"
    assert (lines[0]["suites"], lines[0]["peak_mib"], lines[0]["gpu"]) == ("fa3", "12.0", "NVIDIA H100 80GB HBM3")
    assert (lines[0]["variant"], lines[0]["seq"]) == ("causal", "2048")


# -------------------------------------------------------------------------------------------------------------- report


def test_the_report_says_what_is_slower_and_what_is_missing() -> None:
    text = report(some_results())
    row = next(line for line in text.splitlines() if line.startswith("causal B8 H16 S2048 D128"))
    assert row.endswith("|    2.000   69 |  46  1.50 | 138  0.50<|   -     - ")
    assert "  FLA: OutOfMemoryError: too much [causal B8 H16 S2048 D128]" in text
    assert "  cuDNN is not installed: pip install nothing" in text
    assert "no time for 1 cases: full B1 H1 S1 D64" in text


def met(results: Results) -> dict[tuple[str, str], bool | None]:
    return {(bar.title, bar.which): bar.met for bar in bars.bars(results)}


def test_bars_are_met_missed_or_not_measured() -> None:
    found = met(some_results())
    assert found["causal, full, D64 D128, S2k-16k: over Flex max-autotune", "fwd"] is True
    assert found["causal, full, D64 D128, S2k-16k: over FA4", "fwd"] is False
    assert found["causal, full, D64 D128 D256, S2k-16k: over cuDNN", "fwd"] is None
    assert found["causal, full, D256, S2k-16k: over Flex max-autotune", "fwd"] is None
    assert found["forgetting: over FLA", "bwd"] is None


def test_bars_on_shares_of_our_own_rates() -> None:
    results = some_results()
    results.measurements += changed(results, "D128", "D192", 0.86) + changed(results, "D128", "D80", 9.0)
    assert met(results)["D80 D96 D192: rate over the power of two below", "fwd"] is True
    results.measurements += changed(results, "D128", "D64") + changed(results, "D128", "D96", 0.84)
    bar = next(bar for bar in bars.bars(results) if bar.title.startswith("D80"))
    assert list(bar.missed) == ["causal B8 H16 S2048 D96"]
    results.measurements += changed(results, "S2048", "S16384")
    results.measurements += changed(results, "causal B8 H16 S2048", "window(9) B8 H16 S16384", 0.89)
    assert met(results)["every variant, S16k: rate over causal's", "bwd"] is False
    assert "0.89  window(9) B8 H16 S16384 D128" in bars.bars_table(results)


def test_what_is_wrong_misses_its_bar() -> None:
    results = some_results()
    results.measurements = [m for m in results.measurements if m.implementation != "ours"]
    bar = next(bar for bar in bars.bars(results) if "D64 D128" in bar.title)
    assert (bar.met, bar.missed) == (False, {"causal B8 H16 S2048 D128": 0.0})


def test_bars_say_that_another_gpu_is_not_meant() -> None:
    results = some_results()
    results.machine["gpu"] = "NVIDIA H200"
    assert bars.bars_table(results).splitlines()[0] == "the project's bars, which are for an H100, on NVIDIA H200"


# --------------------------------------------------------------------------------------------------------------- plots


def test_plots_are_made_of_stored_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results = some_results()
    results.measurements += changed(results, "B8 H16 S2048", "B1 H16 S16384")
    record.save(tmp_path / "r.json", results)
    assert command.main(["--from", str(tmp_path / "r.json"), "--plots", str(tmp_path / "plots")]) == 0
    assert sorted(each.name for each in (tmp_path / "plots").iterdir()) == ["rates.png", "ratios_fa3.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in (tmp_path / "plots").iterdir())
    assert f"drawn: {tmp_path / 'plots' / 'rates.png'}" in capsys.readouterr().out


def test_plots_without_matplotlib_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(["--plots", "somewhere"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- command


def test_stored_results_are_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--from", str(STORED[0]), "--csv", str(tmp_path / "r.csv")]) == 0
    assert "the project's bars" in capsys.readouterr().out
    assert (tmp_path / "r.csv").read_text().startswith("suites,case,which,")


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_stored_run_is_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--from", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_a_file_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--from", "no/such.json"]) == 2
    assert "no/such.json" in capsys.readouterr().err
