"""A generated package in a folder: finding and importing it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import PROGRAM
from codegen.util.errors import CodegenError


@dataclass(frozen=True, kw_only=True)
class Package:
    """A generated package: the folder it is in, and its name there."""

    root: str
    name: str


def find_package(out: Path) -> Package:
    """The generated package in a folder, importable from now on."""
    folder = out.resolve()
    if not (folder / "MANIFEST.json").is_file():
        raise CodegenError(
            f"{out}: no generated package there; run `{PROGRAM} render`, or name one by --out or --package"
        )
    manifest_of(folder)
    return Package(root=str(folder.parent), name=imported(folder))


def manifest_of(package: Path) -> dict[str, Any]:
    """The manifest of a generated package: its `variants` and its `files`.

    Raises:
        CodegenError: the file is none, for example because it has the marks of a conflict between branches.
    """
    path = package / "MANIFEST.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    match found:
        case {"variants": dict(), "files": dict(files)} if "__init__.py" in files:
            return dict(found)
    remedy = f"restore it from version control, or delete the package and run `{PROGRAM} render`"
    raise CodegenError(f"{path}: not the manifest of a generated package: {remedy}")


def read_model(package: str, function: str, config: Path, option: str) -> Any:
    """What a function of the package's module `integrations.transformers_spec` says of the model with a config.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        CodegenError: transformers or the package refuses the config; the message begins with `option`.
    """
    try:
        return getattr(importlib.import_module(f"{package}.integrations.transformers_spec"), function)(config)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # transformers checks configs by assertions and by errors of its own, too
        raise CodegenError(f"{option} {config}: {str(error) or type(error).__name__}") from None


def installed(name: str, default: Path | None = None) -> Path:
    """The folder of the generated package that Python imports as `name`; where there is none, `default`."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "MANIFEST.json").is_file():
            return Path(location)
    if default is not None:
        return default
    got = "Python finds no such package" if spec is None else f"{spec.origin} is none"
    raise CodegenError(f"--package: expected the name of a generated package, got {name!r}: {got}")


def imported(folder: Path) -> str:
    """The name of the package in `folder`, made importable.

    It is imported by the folder's own name, which is part of the keys of Triton's cache.
    """
    parent = str(folder.parent)
    if parent not in sys.path:
        sys.path.insert(0, parent)
    package = importlib.import_module(folder.name)
    found = [Path(path).resolve() for path in package.__path__]
    if found != [folder]:
        raise CodegenError(f"{folder}: a package of the name {folder.name} is already imported, from {found[0]}")
    return folder.name
