"""What a report of `codegen port` says about entries."""

from __future__ import annotations

import re

from codegen.port.command import Report


def formulas(report: Report) -> dict[str, str]:
    """Entry -> its mask and its score, with a bar between them."""
    found: dict[str, list[str]] = {}
    for line in report.text.splitlines():
        if entry := re.fullmatch(r"  (\w+):", line):
            found[entry[1]] = []
        elif formula := re.fullmatch(r"    (?:mask|score): (.*)", line):
            list(found.values())[-1].append(formula[1])
    return {name: " | ".join(parts) for name, parts in found.items()}
