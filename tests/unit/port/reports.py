"""Reports of `codegen port` for files that tests write, and what they say about entries."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from codegen.port.command import Report, port


def port_text(folder: Path, source: str) -> Report:
    """The report of a file in `folder` that has this text, whose indentation is removed."""
    path = folder / "mods.py"
    path.write_text(textwrap.dedent(source))
    return port(path)


def formulas(report: Report) -> dict[str, str]:
    """Entry -> its mask and its score, with a bar between them."""
    found: dict[str, list[str]] = {}
    for line in report.text.splitlines():
        if entry := re.fullmatch(r"  (\w+):", line):
            found[entry[1]] = []
        elif formula := re.fullmatch(r"    (?:mask|score): (.*)", line):
            list(found.values())[-1].append(formula[1])
    return {name: " | ".join(parts) for name, parts in found.items()}
