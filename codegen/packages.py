"""A generated package in a folder: finding and importing it, and the names a command may say of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import CodegenError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Package:
    """A generated package: the folder it is in, and its name there."""

    root: str
    name: str


def find_package(out: Path) -> Package:
    """The generated package in a folder, importable from now on."""
    folder = out.resolve()
    if not (folder / "MANIFEST.json").is_file():
        raise CodegenError(f"{out}: no generated package there; run `python -m codegen render`, or give --out")
    root = str(folder.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    found = importlib.import_module(folder.name)
    if Path(found.__path__[0]).resolve() != folder:
        raise CodegenError(f"{out}: another package named {folder.name} is imported in its place: rename the folder")
    return Package(root=root, name=folder.name)


def chosen(option: str, named: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """What was named, each checked, or all there is."""
    for name in named:
        if name not in known:
            hint = did_you_mean(name, known)
            raise CodegenError(f"{option}: expected one of {', '.join(known)}, got '{name}'{hint}")
    return named or known
