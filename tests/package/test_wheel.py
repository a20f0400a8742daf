"""The wheel, installed into a fresh environment: it renders, lists and explains far from any checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# The build needs no network: hatchling itself is asked, in a process of its own.
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel unpacked in it, which sees what is installed beside these tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A .pth file adds a folder, but not what the .pth files of that folder add: an editable install is not seen.
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def codegen(environment: Path, cwd: Path, *args: str) -> str:
    """What the installed command line prints."""
    python = Path(sysconfig.get_path("scripts", "venv", vars={"base": str(environment)})) / "python"
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [str(python), "-c", "import sys; from codegen.cli.main import main; sys.exit(main())", *args]
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_both_spec_files_and_the_tuned_tiles(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"codegen/_data/variants.yaml", "codegen/_data/library.yaml", "codegen/_data/templates/README.md"} <= names
    tuned = {path.relative_to(ROOT).as_posix() for path in (ROOT / "generated" / "tuned").rglob("*.json")}
    assert tuned <= names


def test_an_installed_generator_renders_a_spec_that_uses_the_library(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "variants.yaml").write_text("variants:\n  near: {mask: causal and window(64), score: softcap(30.0)}\n")
    assert codegen(environment, tmp_path, "render", "--out", "ops").startswith("ops: ")
    assert codegen(environment, tmp_path, "check", "--out", "ops").startswith("ops: up to date")
    assert (tmp_path / "ops" / "near" / "fwd.py").is_file()


def test_an_installed_generator_lists_the_collection_and_the_library(environment: Path, tmp_path: Path) -> None:
    assert "\nlongformer\n" in codegen(environment, tmp_path, "list", "--variants", "library.yaml")
    assert "\ncausal\n" in codegen(environment, tmp_path, "list")


@pytest.mark.parametrize("options", [[], ["--package", "generated"]], ids=["default", "named"])
def test_an_installed_package_is_explained(options: list[str], environment: Path, tmp_path: Path) -> None:
    shown = codegen(environment, tmp_path, "explain", "causal", "--gpu", "h100", *options)
    assert shown.startswith("causal on h100 (sm_90)")
    assert "h100/causal.json" in shown
