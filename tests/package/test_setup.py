"""Tests of the set-up's checks: the requests to uv, the use of its answer, and what the checks never do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.setup import __main__ as setup_checks
from tests.setup import check_pythons, newest_triton, pythons, resolution
from tests.support.paths import ROOT


def test_requirements_are_those_of_the_project_with_its_own_extras_resolved() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = resolution.requirements("test", "dev")
    optional = project["optional-dependencies"]
    assert {*project["dependencies"], *optional["dev"], *optional["show"]} <= set(found)
    assert not [line for line in found if line.startswith(project["name"])]


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.9.0"])
def test_a_triton_that_serves_is_accepted(triton: str) -> None:
    assert resolution.judged({"torch": "2.13.0", "triton": triton}) == (
        True,
        f"torch 2.13.0, triton {triton} and 2 packages in all",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has Triton")
@pytest.mark.parametrize("versions", [{"triton": "3.5.1"}, {"triton": "3.10.0"}, {"triton": "4.0.0"}, {}])
def test_a_triton_that_does_not_serve_is_refused(versions: dict[str, str]) -> None:
    serves, text = resolution.judged({"torch": "2.13.0", **versions})
    assert not serves
    assert text.endswith("; expected Triton 3.6 to 3.9")


def test_the_index_is_asked_without_local_wheels_and_other_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL", "CONSTRAINT", "NO_INDEX", "CERT", "PROXY"):
        monkeypatch.setenv(f"PIP_{name}", "x")
        monkeypatch.setenv(f"UV_{name}", "x")
    environment = resolution.public_environment()
    given = {name for name in environment if name.startswith(("PIP_", "UV_"))}
    assert given == {"PIP_CERT", "PIP_PROXY", "PIP_CONFIG_FILE", "PIP_DISABLE_PIP_VERSION_CHECK", "UV_NO_CONFIG"}
    assert environment["PIP_CONFIG_FILE"] == os.devnull
    assert environment["SSL_CERT_FILE"] == "x"


def test_versions_are_read_from_what_uv_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | Path] = []

    def run(*command: str | Path, given: str) -> subprocess.CompletedProcess[str]:
        asked.extend([*command, given])
        return subprocess.CompletedProcess(command, 0, "torch==2.13.0\ntriton==3.7.1\nzipp==4.1.2\n", "")

    monkeypatch.setattr(resolution, "run", run)
    found = resolution.resolve(Path("uv"), "3.12", ["torch==2.13.0", "jinja2"])
    assert found == (True, "torch 2.13.0, triton 3.7.1 and 3 packages in all")
    assert asked[-1] == "torch==2.13.0\njinja2"
    assert "--python-version=3.12" in asked


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("error: No solution found when resolving dependencies", False),
        ("error: Request failed after 3 retries\n  cause: Failed to fetch: https://example.org/simple/torch/", None),
    ],
)
def test_an_index_that_does_not_answer_is_no_verdict(
    stderr: str, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*command: str | Path, given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, given, stderr)

    monkeypatch.setattr(resolution, "run", failed)
    assert resolution.resolve(Path("uv"), "3.12", ["torch==2.13.0"]) == (expected, stderr)


def test_the_python_that_runs_this_is_found() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version not in pythons.SUPPORTED:
        pytest.skip(f"Python {version} is not among {', '.join(pythons.SUPPORTED)}")
    assert version in pythons.found()
    assert version in pythons.summary()


def test_a_python_whose_packages_cannot_be_installed_is_said_not_to_be_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_pythons, "FOLDER", tmp_path)
    monkeypatch.setattr(pythons, "found", lambda: {"3.11": Path("no such interpreter")})
    monkeypatch.setattr(check_pythons, "environment", lambda *_: "no network")
    assert check_pythons.main() == 0
    assert "Python 3.11: NOT CHECKED: its packages could not be installed: no network" in capsys.readouterr().out


def test_a_torch_that_brings_its_triton_is_tested_with_that_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: ["triton==3.7.1; platform_system == 'Linux'"])
    monkeypatch.setattr(newest_triton, "install", lambda: pytest.fail("nothing is to be installed"))
    assert newest_triton.main() == 0
    assert "brings its own" in capsys.readouterr().out


@pytest.mark.parametrize(("failing", "spilled"), [("pytest", 232), ("codegen", 232), (None, 232), (None, 704)])
def test_the_newest_triton_interprets_and_compiles(
    monkeypatch: pytest.MonkeyPatch, failing: str | None, spilled: int
) -> None:
    ran = {}
    kernels = [
        {"kernel": "causal_hopper_bwd", "usage": {"spill_loads": spilled}},
        {"kernel": "causal_hopper_fwd", "usage": {"spill_loads": 1000}},
    ]

    def run(command: list[str], *, cwd: Path, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        assert (cwd, check, env["PYTHONPATH"]) == (ROOT, False, str(newest_triton.FOLDER))
        ran[command[2]] = env.get("TRITON_INTERPRET")
        if command[2] == "codegen":
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"kernels": kernels}), encoding="utf-8")
        return subprocess.CompletedProcess(command, int(command[2] == failing))

    monkeypatch.setattr(newest_triton, "brings_triton", lambda: False)
    monkeypatch.setattr(newest_triton, "install", lambda: "")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.6.0")
    assert newest_triton.main() == int(failing is not None or spilled > newest_triton.MOST_SPILLS)
    assert ran == {"pytest": "1", "codegen": None}


def test_setup_checks_all_run_and_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_checks, "checks", lambda torch: [["a"], ["b", torch]])

    def run(check: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(check, int(check[0] == "a"), f"of {check[-1]}\n")

    monkeypatch.setattr(setup_checks, "run", run)
    assert setup_checks.main("torch==1") == 1
    shown = capsys.readouterr().out
    assert "a\nof a\n" in shown
    assert "b\nof torch==1\n" in shown


@pytest.mark.parametrize("argv", [[], ["torch==2.13.0", "--fast"], ["torch==2.13.0", "triton==3.6.0"]])
def test_a_wrong_command_line_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        resolution.torch_argument("tests.setup", None, argv)
    assert capsys.readouterr().err.startswith("usage: python -m tests.setup [-h] TORCH\n")
    assert resolution.torch_argument("tests.setup", None, ["torch==2.13.0"]) == "torch==2.13.0"
