"""Renders a spec that an example holds as text, and imports the package."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from codegen.cli.main import main as codegen
from codegen.load.spec_file import load
from codegen.spec.model import Spec


def render(spec: str, name: str) -> ModuleType:
    """The torch ops of a spec: what `codegen render --out NAME` and `import NAME.torch` give.

    The package lies in a new temporary folder for as long as the process runs. In a program of yours, render once and
    check the package in.
    """
    folder = Path(tempfile.mkdtemp(prefix="attention-"))
    variants = folder / f"{name}.yaml"
    variants.write_text(spec, encoding="utf-8")
    code = codegen(["render", "--variants", str(variants), "--out", str(folder / name)])
    if code != 0:
        raise RuntimeError(f"codegen render: expected exit code 0, got {code}")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.torch")
    finally:
        sys.path.remove(str(folder))


def read(text: str) -> Spec:
    """A spec from its text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(text, encoding="utf-8")
        return load(path)
