"""Whether a package was rendered from the variants of a spec."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from codegen.render.files import MANIFEST
from codegen.render.manifest import entry_hash
from codegen.spec.model import Spec
from codegen.util.errors import CodegenError


def is_origin(spec: Spec, package: Path, name: str) -> bool:
    """Whether the package computes the same formulas as the spec's variant of this name, if there is one."""
    return name in spec.variants and _hash(_entries(package), name) == entry_hash(spec.variants[name])


def check_origin(spec: Spec, package: Path, names: Iterable[str]) -> None:
    """Raise unless the package computes the same formulas as the spec's variants of these names."""
    entries = _entries(package)
    for name in names:
        if name not in spec.variants:
            raise CodegenError(
                f"{spec.path} has no variant '{name}', which the package in {package} has: name the spec that it is "
                "rendered from with --variants FILE"
            )
        if _hash(entries, name) != entry_hash(spec.variants[name]):
            raise CodegenError(
                f"the variant '{name}' of {spec.path} is not the one that the package in {package} has: name the spec "
                "that the package is rendered from with --variants FILE, or render it again"
            )


def _hash(entries: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    entry = entries.get(name)
    return None if entry is None else entry["hash"]


def _entries(package: Path) -> dict[str, dict[str, str]]:
    entries: dict[str, dict[str, str]] = json.loads((package / MANIFEST).read_text(encoding="utf-8"))["variants"]
    return entries
