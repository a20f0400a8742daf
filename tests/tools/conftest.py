"""Packages that tests of the command line read or change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from codegen.cli.main import main
from tests.support.command_line import SPEC


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `variants.yaml` and the package rendered from it; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "variants.yaml").write_text(SPEC)
    assert main(["render", "--variants", str(folder / "variants.yaml")]) == 0
    return folder


@pytest.fixture
def project(rendered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of `rendered`, as the current folder."""
    folder = tmp_path / "project"
    shutil.copytree(rendered, folder)
    monkeypatch.chdir(folder)
    return folder
