"""The errors that code raises, found in its source: what calls expect of their arguments, and what commands refuse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generators import ROOT

ELLIPSIS = "…"
"""Replaces the values that a message fills in."""


def expected_arguments() -> dict[str, list[str]]:
    """Argument of a call -> what errors about it say was expected, from each `fail(op, argument, expected, got)`."""
    found: dict[str, set[str]] = {}
    for _, call in _calls(ROOT / "runtime", "fail", 4):
        argument, expected = template(call.args[1]), template(call.args[2])
        # A text that consists of filled-in values alone says nothing here.
        if argument != ELLIPSIS and expected.strip("… ") and not expected.startswith(ELLIPSIS):
            found.setdefault(argument, set()).add(expected)
    return {argument: sorted(found[argument]) for argument in sorted(found)}


def command_errors() -> list[tuple[str, str]]:
    """Folder of codegen/ and message of each `CodegenError(...)` with more than 12 word characters of literal text."""
    found = set()
    for path, call in _calls(ROOT / "codegen", "CodegenError", 1):
        message = template(call.args[0])
        if len(re.sub(r"\W", "", message)) > 12:
            found.add((path.relative_to(ROOT / "codegen").parts[0].removesuffix(".py"), message))
    return sorted(found)


def template(node: ast.expr) -> str:
    """A string of the source, with an ellipsis in place of each filled-in value.

    >>> template(ast.parse("f'{name}: expected {low} to 3'", mode="eval").body)
    '…: expected … to 3'
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(f"{ELLIPSIS}+", ELLIPSIS, "".join(map(template, node.values)))
    return ELLIPSIS


def _calls(folder: Path, name: str, least: int) -> Iterator[tuple[Path, ast.Call]]:
    """Each call of a function with at least `least` arguments, in the modules of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or len(node.args) < least:
                continue
            if isinstance(node.func, ast.Name) and node.func.id == name:
                yield path, node
