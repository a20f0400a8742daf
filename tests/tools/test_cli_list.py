"""What the command line prints about a spec: its variants as text and as JSON, and the schema of specs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.cli.main import main
from codegen.render import files
from tests.support.paths import ROOT

LISTED = """\
variants:
  causal: {mask: causal}
  alibi:
    doc: Each key counts less by its distance, times a learned slope per head, so that this text takes several lines.
    mask: causal
    score: alibi
    tensors: {slope: {dims: [h], grad: true}}
  window: {mask: causal and window(size), scalars: {size: int}}
  t5: {score: "score + t[q_idx - kv_idx]", tensors: {t: {dims: [n], grad: true}}}
  gpt_oss: {mask: causal and window(128), sink: true}
  dropped: {decay: true, dropout: true}
"""

LIST = """\
causal
  mask     causal

alibi
  Each key counts less by its distance, times a learned slope per head, so that
  this text takes several lines.
  mask     causal
  score    alibi
  tensors  slope[h] float32 (grad)

window
  mask     causal and window(size)
  scalars  size: int

t5
  score    score + t[q_idx - kv_idx]
  tensors  t[n] float32 (grad)
  extras   atomic in packed and segmented calls

gpt_oss
  mask     causal and window(128)
  extras   sink

dropped
  extras   decay, dropout
"""


def test_list_prints_a_paragraph_per_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("variants.yaml").write_text(LISTED)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    assert capsys.readouterr().out == LIST


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_list_wraps_to_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["list", "--variants", "library.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(columns, 120)


def test_list_json_is_what_the_manifest_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["list", "--json"]) == 0
    manifest = json.loads((ROOT / "generated" / files.MANIFEST).read_text())
    assert json.loads(capsys.readouterr().out) == manifest["variants"]


def test_library_yaml_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--variants", "library.yaml"]) == 0
    assert "\nlongformer\n" in capsys.readouterr().out


def test_list_without_a_spec_shows_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    assert "gemma2_local" in capsys.readouterr().out


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert "variants" in json.loads(capsys.readouterr().out)["properties"]


def test_a_terminal_without_a_character_gets_its_escape(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("variants: {band: {doc: 'Größe', mask: causal}}", encoding="utf-8")
    command = [sys.executable, "-m", "codegen", "list", "--variants", str(tmp_path / "mine.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Gr\\xf6\\xdfe" in result.stdout


def test_a_reader_that_stops_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "codegen", "schema"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, b"")
