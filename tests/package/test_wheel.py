"""The wheel, installed into a fresh environment far from any checkout: one package, its ops and its command line."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import pytest

from tests.support.paths import ROOT

Build = Callable[[str], Path]
"""Builds a `wheel` or an `editable` wheel, and returns its path."""

# The build needs no network: a separate process calls hatchling directly.
BUILD = "import sys; from hatchling import build; print(getattr(build, f'build_{sys.argv[1]}')(sys.argv[2]))"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")

    def built(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-c", BUILD, kind, str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder / done.stdout.split()[-1]

    return built


@pytest.fixture(scope="module")
def wheel(build: Build) -> Path:
    return build("wheel")


class Environment:
    """A virtual environment with an unpacked wheel, which also sees the packages installed for these tests."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False)
        paths = {"base": str(folder), "platbase": str(folder)}
        self.packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        self.python = Path(sysconfig.get_path("scripts", "venv", vars=paths)) / "python"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.packages)
        # A .pth file adds a folder, but does not process that folder's .pth files: an editable install is not seen.
        (self.packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python; its output is captured."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
        return subprocess.run([str(self.python), *args], cwd=cwd, env=kept, capture_output=True, text=True, check=False)

    def script(self, cwd: Path, code: str) -> str:
        done = self.run(cwd, "-c", textwrap.dedent(code))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def codegen(self, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the console script, as an installer writes it from the wheel's entry point."""
        (entry_points,) = self.packages.glob("attention_codegen-*.dist-info/entry_points.txt")
        module, function = entry_points.read_text(encoding="utf-8").split("codegen = ")[1].strip().split(":")
        return self.run(cwd, "-c", f"import sys; from {module} import {function}; sys.exit({function}())", *args)

    def printed(self, cwd: Path, *args: str) -> str:
        """The output of a command of the console script, which must succeed."""
        done = self.codegen(cwd, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a spec that uses the named masks and scores of the library."""
    (tmp_path / "variants.yaml").write_text("variants:\n  near: {mask: causal and window(64), score: softcap(30.0)}\n")
    return tmp_path


# -------------------------------------------------------------------------------------------------------------- content


def test_wheel_has_one_top_level_package(wheel: Path) -> None:
    top = {PurePosixPath(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"attention_codegen"}


def test_wheel_holds_all_that_ops_and_generator_read(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = "attention_codegen/codegen/_data"
    read = ("variants.yaml", "library.yaml", "templates/README.md", "runtime/core/tuned.py", "integrations/README.md")
    assert {f"{data}/{name}" for name in read} <= names
    assert {"attention_codegen/py.typed", "attention_codegen/codegen/py.typed"} <= names
    rendered = {path for path in (ROOT / "generated").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {f"attention_codegen/{path.relative_to(ROOT / 'generated').as_posix()}" for path in rendered} <= names
    modules = (ROOT / "codegen").rglob("*.py")
    assert {f"attention_codegen/{path.relative_to(ROOT).as_posix()}" for path in modules} <= names


def test_wheel_states_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = message_from_bytes(archive.read(metadata))
        text = archive.read(metadata.replace("METADATA", "licenses/LICENSE")).decode()
    assert headers["License-Expression"] == "Apache-2.0"
    assert "Apache License" in text
    assert "Copyright 2026" in text


def test_no_module_of_the_wheel_imports_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    found = set()
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {(name, alias.name.split(".")[0]) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((name, str(node.module).split(".")[0]))
    assert not {pair for pair in found if pair[1] in ("bench", "codegen", "emulator", "examples", "generated", "tests")}


# ------------------------------------------------------------------------------------------------------------------ ops


def test_importing_the_package_imports_no_framework(environment: Environment, tmp_path: Path) -> None:
    code = """
    import sys, attention_codegen, attention_codegen.codegen.cli.main
    print(sorted({"torch", "triton", "jax", "numpy"} & sys.modules.keys()))
    """
    assert environment.script(tmp_path, code) == "[]\n"


def test_installed_op_trains(environment: Environment, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
    import torch
    from attention_codegen.torch import causal

    torch.manual_seed(0)
    x, project = torch.randn(2, 8, 16), torch.nn.Linear(16, 48)
    optimizer = torch.optim.SGD(project.parameters(), lr=0.1)

    def loss():
        q, k, v = project(x)[:, None].chunk(3, dim=-1)
        return (causal(q, k, v)[:, 0] - x).square().mean()

    before = loss()
    before.backward()
    optimizer.step()
    print(causal.__module__, bool(loss() < before))
    """
    assert environment.script(tmp_path, code) == "attention_codegen.causal.torch_op True\n"


def test_installed_op_of_jax_has_gradients(environment: Environment, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    code = """
    import jax
    from attention_codegen.jax import causal

    q = jax.numpy.ones((1, 8, 2, 16))
    print(jax.grad(lambda q: causal(q, q, q).sum())(q).shape)
    """
    assert environment.script(tmp_path, code) == "(1, 8, 2, 16)\n"


# --------------------------------------------------------------------------------------------------------- command line


def test_installed_generator_renders_a_package_that_runs(environment: Environment, project: Path) -> None:
    assert environment.printed(project, "render", "--out", "ops").startswith("ops: ")
    assert environment.printed(project, "check", "--out", "ops").startswith("ops: up to date")
    code = "import torch; from ops.torch import near; print(near(*torch.ones(3, 1, 2, 4, 16)).shape)"
    assert environment.script(project, code) == "torch.Size([1, 2, 4, 16])\n"


def test_installed_generator_finds_both_spec_files(environment: Environment, tmp_path: Path) -> None:
    assert "\nlongformer\n" in environment.printed(tmp_path, "list", "--variants", "library.yaml")
    assert "\ncausal\n" in environment.printed(tmp_path, "list")
    assert "16 queries" in environment.printed(tmp_path, "show", "causal", "--q-len", "16")
    assert "json-schema.org" in environment.printed(tmp_path, "schema")


@pytest.mark.parametrize("options", [[], ["--package", "attention_codegen"]], ids=["default", "named"])
def test_installed_ops_are_explained(options: list[str], environment: Environment, tmp_path: Path) -> None:
    shown = environment.printed(tmp_path, "explain", "causal", "--gpu", "h200", *options)
    assert shown.startswith("causal on h200 (sm_90)")
    assert "h200/causal.json" in shown


def test_installed_generator_compiles_in_worker_processes(environment: Environment, project: Path) -> None:
    """`lint` and `tune` share the pool of processes that import the generator by its name."""
    pytest.importorskip("triton")
    environment.printed(project, "render")
    options = ("--arch", "sm_90", "--dtype", "bfloat16", "--head-dim", "64", "--passes", "fwd", "--modes", "dense")
    shown = environment.printed(project, "lint", "near", "--jobs", "1", *options)
    assert re.search(r"^all +[1-9]\d* +0 +0$", shown, re.MULTILINE)  # kernels, errors, warnings


def test_installed_tuner_finds_the_installed_ops(environment: Environment, tmp_path: Path) -> None:
    """It looks for the package and the spec before it asks for a GPU, and its messages name the console script."""
    done = environment.codegen(tmp_path, "tune", "causl")
    assert done.returncode == 2
    assert "did you mean 'causal'?" in done.stderr
    done = environment.codegen(tmp_path, "tune", "causal", "--out", "missing")
    assert done.stderr.startswith(
        "error: missing: no generated package there; `codegen render --variants SPEC --out missing` makes one"
    )


def test_benchmark_is_refused_outside_a_checkout(environment: Environment, tmp_path: Path) -> None:
    done = environment.codegen(tmp_path, "bench", "--suite", "core")
    assert (done.returncode, done.stdout) == (2, "")
    message = "the benchmark is not installed: run `python -m bench` in a checkout of the repository"
    assert done.stderr == f"error: {message}\n"


# ------------------------------------------------------------------------------------------------------------- editable


def test_editable_installation_has_the_names_of_checkout_and_wheel(
    build: Build, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    installed = Environment(tmp_path_factory.mktemp("editable"), build("editable"))
    code = """
    import codegen, generated, attention_codegen, attention_codegen.codegen
    print(attention_codegen.VARIANTS == generated.VARIANTS, codegen.PACKAGE)
    print(codegen.__file__, *attention_codegen.codegen.__path__)
    """
    same, paths = installed.script(tmp_path, code).splitlines()
    assert same == "True generated"
    assert paths == f"{ROOT / 'codegen' / '__init__.py'} {ROOT / 'codegen'}"
    assert "\ncausal\n" in installed.printed(tmp_path, "list")
