"""Packages that are rendered for tests, each once for all workers of a run."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

LONGEST_RENDERING = 900.0
"""Seconds that a worker waits for another to render a package; the variants of library.yaml take 30 to 60."""


@contextmanager
def importable(folder: Path, name: str, spec: str | Path) -> Iterator[Path]:
    """The package `name`, rendered from a spec's text or file; it can be imported inside the `with` block.

    It lies in `folder`. With several workers it lies in the folder of their run, and the first worker renders it.
    """
    for module in ("jinja2", "yaml", "ruff"):
        pytest.importorskip(module, reason=f"rendering needs {module}")
    text = spec if isinstance(spec, str) else spec.read_text(encoding="utf-8")
    folder = _shared_folder(folder, text)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one_worker(folder.with_suffix(".lock")):
        if not (folder / f"{name}.rendered").exists():
            _render(folder, name, spec)
            (folder / f"{name}.rendered").touch()
    sys.path.insert(0, str(folder))
    try:
        yield folder / name
    finally:
        sys.path.remove(str(folder))


def _render(folder: Path, name: str, spec: str | Path) -> None:
    from codegen.cli import main as cli
    from codegen.render import package

    if isinstance(spec, str):
        (folder / "spec.yaml").write_text(spec, encoding="utf-8")
        spec = folder / "spec.yaml"
    with mock.patch.object(package, "kernel_hash", _file_hash):
        assert cli.main(["render", "--variants", str(spec), "--out", str(folder / name)]) == 0


def _file_hash(path: str, kernels: Iterable[str], sources: Mapping[str, str]) -> str:
    """A hash of a kernel's whole file. The generator's own, of the code that a kernel uses, takes a third of the time
    of rendering, and only finds tiles that were measured: nobody measured kernels of these packages."""
    return hashlib.sha256(" ".join((*sorted(kernels), sources[path])).encode()).hexdigest()[:16]


def _shared_folder(folder: Path, text: str) -> Path:
    """The folder that all workers of a run share for a package, named by a hash of the spec; else `folder` itself."""
    worker = f"popen-{os.environ.get('PYTEST_XDIST_WORKER')}"
    runs = [parent.parent for parent in folder.parents if parent.name == worker]
    # Hypothesis searches source files for numbers to try, which takes long. It leaves out folders called tests.
    return runs[0] / "tests" / hashlib.sha256(text.encode()).hexdigest()[:16] if runs else folder


@contextmanager
def _only_one_worker(lock: Path) -> Iterator[None]:
    """Only one worker at a time is inside the `with` block; the others wait."""
    deadline = time.monotonic() + LONGEST_RENDERING
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{lock}: another worker has rendered for {LONGEST_RENDERING:.0f} s") from None
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.unlink()


def lint_problems(package: str, settings: Path | None = None) -> str:
    """The linter's messages about a package that can be imported, by the rules of a settings file. Without a file the
    linter looks for unused and undefined names. Empty if there are no messages."""
    folder = Path(importlib.import_module(package).__file__ or "").parent
    rules = ["--isolated", "--select", "F"] if settings is None else ["--config", str(settings)]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", *rules, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
