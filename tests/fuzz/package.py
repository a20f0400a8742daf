"""Variants rendered into a package, many at a time: the formatter then runs once for all."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attention import Entry
from .specs import cleaned

EMPTY = "no query attends to any key"
"""What the loader says of a mask that keeps no pair."""

_made = 0


@dataclass(frozen=True, kw_only=True)
class Package:
    """An importable package of variants, and the reason why each of the others is none."""

    name: str
    entries: Mapping[str, Entry]
    refused: Mapping[str, str]
    broken: Mapping[str, str]

    def op(self, variant: str) -> Any:
        return getattr(importlib.import_module(f"{self.name}.torch"), variant)

    def is_atomic(self, variant: str) -> bool:
        """Whether a gradient is added up in any order in some calls, which then refuse `deterministic=True`."""
        traits = importlib.import_module(f"{self.name}._runtime.kernels").TRAITS
        return bool(traits[variant].atomic_modes)


def name_of(number: int) -> str:
    return f"variant_{number}"


def spec_text(entries: Mapping[str, Entry]) -> str:
    """A spec file: JSON is YAML."""
    lines = [f"  {name}: {json.dumps(entry)}" for name, entry in entries.items()]
    return "\n".join(["variants:", *lines, ""])


@contextmanager
def rendered(folder: Path, entries: Mapping[str, Entry]) -> Iterator[Package]:
    """Render what the loader takes. Entries that it refuses are `refused`, those that do not render `broken`."""
    global _made
    _made += 1
    name = f"fuzz_package_{_made}"
    # On a GPU an op looks at the values of positions, and refuses them, in debug mode alone.
    os.environ["ATTENTION_DEBUG"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    refused: dict[str, str] = {}
    legal: dict[str, Entry] = {}
    for variant, drawn in entries.items():
        entry, reason = legalised(folder, variant, drawn)
        if reason:
            refused[variant] = reason
        else:
            legal[variant] = entry
    broken: dict[str, str] = {}
    _render(folder, name, legal, broken)
    sys.path.insert(0, str(folder))
    try:
        kept = {variant: entry for variant, entry in legal.items() if variant not in broken}
        yield Package(name=name, entries=kept, refused=refused, broken=broken)
    finally:
        sys.path.remove(str(folder))
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]
        shutil.rmtree(folder / name, ignore_errors=True)


def legalised(folder: Path, variant: str, entry: Entry) -> tuple[Entry, str]:
    """An entry without what the loader finds to be of no use, and why it is refused all the same.

    That is a mask that keeps no pair, and a `grad: true` of a gradient that is always zero.
    """
    reason = refusal(folder, variant, entry)
    if EMPTY in reason:
        entry = cleaned({name: x for name, x in entry.items() if name != "mask"})
        reason = refusal(folder, variant, entry)
    useless = set(re.findall(r"tensors\.(\w+)\.grad: [^\n]*remove 'grad'", reason))
    if not useless:
        return entry, reason
    tensors = {
        name: {key: x for key, x in declared.items() if key != "grad" or name not in useless}
        for name, declared in entry["tensors"].items()
    }
    entry = {**entry, "tensors": tensors}
    return entry, refusal(folder, variant, entry)


def refusal(folder: Path, variant: str, entry: Entry) -> str:
    """Why the loader does not take an entry; empty where it does."""
    from codegen.load.spec_file import load
    from codegen.util.errors import CodegenError

    path = folder / "one.yaml"
    path.write_text(spec_text({variant: entry}), encoding="utf-8")
    try:
        load(path)
    except CodegenError as error:
        return str(error)
    return ""


def _render(folder: Path, name: str, entries: Mapping[str, Entry], broken: dict[str, str]) -> None:
    """Render the entries; where that fails, find those at fault by halves and render the others."""
    error = _attempt(folder, name, entries) if entries else ""
    if not error:
        return
    broken |= dict(_culprits(folder, list(entries), entries, error))
    _attempt(folder, name, {variant: entry for variant, entry in entries.items() if variant not in broken})


def _culprits(
    folder: Path, names: Sequence[str], entries: Mapping[str, Entry], error: str
) -> Iterator[tuple[str, str]]:
    if len(names) == 1:
        yield names[0], error
        return
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        found = _attempt(folder, "fuzz_part", {name: entries[name] for name in half})
        if found:
            yield from _culprits(folder, half, entries, found)


def _attempt(folder: Path, name: str, entries: Mapping[str, Entry]) -> str:
    """Render; the error, if it fails."""
    from codegen.cli import main as cli

    shutil.rmtree(folder / name, ignore_errors=True)
    spec = folder / "spec.yaml"
    spec.write_text(spec_text(entries), encoding="utf-8")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            code = cli.main(["render", "--variants", str(spec), "--out", str(folder / name)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if code == 0 else told.getvalue().strip() or f"exit code {code}"
