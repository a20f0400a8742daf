"""The package in a folder: a manifest that is damaged is one error of every command that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.cli.main import main
from codegen.compile.packages import find_package, manifest_of
from tests.support.paths import ROOT

DAMAGED = ["", "<<<<<<< ours\n{}", "[]", "{}", '{"variants": {}, "files": {}}', "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_manifest_is_one_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "damaged"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MANIFEST.json").write_text(text, encoding="utf-8")
    for command in (
        ["hub", str(package), "--out", str(tmp_path / "kernel")],
        ["warm", "causal", "--gpu", "sm_90", "--out", str(package)],
        ["compare", str(ROOT / "generated"), str(package)],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {package / 'MANIFEST.json'}: not the manifest of a generated package: restore")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_the_manifest_of_a_package() -> None:
    assert manifest_of(ROOT / "generated").keys() >= {"variants", "files"}
    assert find_package(ROOT / "generated").name == "generated"
