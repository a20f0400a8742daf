"""Packages that are rendered for tests."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def importable(folder: Path, name: str, spec: str | Path) -> Iterator[Path]:
    """The package `name` in `folder`, of a spec or a file with one; it can be imported as long as this is open."""
    for module in ("jinja2", "yaml", "ruff"):
        pytest.importorskip(module, reason=f"rendering needs {module}")
    from codegen.cli import main as cli

    if isinstance(spec, str):
        folder.mkdir(exist_ok=True)
        text, spec = spec, folder / "spec.yaml"
        spec.write_text(text, encoding="utf-8")
    assert cli.main(["render", "--variants", str(spec), "--out", str(folder / name)]) == 0
    sys.path.insert(0, str(folder))
    try:
        yield folder / name
    finally:
        sys.path.remove(str(folder))


def unused_or_undefined(package: str) -> str:
    """What the linter says of names in a package that can be imported: empty where each is defined, and used."""
    folder = Path(importlib.import_module(package).__file__ or "").parent
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--quiet",
        "--select",
        "F",
        str(folder),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
