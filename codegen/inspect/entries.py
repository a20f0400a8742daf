"""The entry of one variant as a separate spec file, copied word for word from the file that has it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from codegen.spec.model import Variant


def entry_text(text: str, variant: Variant, *, with_macros: bool) -> str:
    """A spec file with one variant, as it is written in `text`, without its own block sizes.

    `with_macros`: with the named masks and scores of `text` that the entry uses, if other files do not inherit them.
    """
    lines = text.splitlines()
    sections = [f"variants:\n{_without_archs(_block(lines, variant.line - 1))}"]
    if with_macros:
        used = f"{variant.mask_text} {variant.score_text}"
        for section in ("scores", "masks"):
            found = [block for name, block in _macros(lines, section) if re.search(rf"\b{name}\b", used)]
            if found:
                sections.insert(0, f"{section}:\n" + "\n".join(found))
    return "\n".join(sections) + "\n"


def _block(lines: list[str], first: int) -> str:
    """The entry that begins in a line, up to the next one that is indented no further."""
    indent = _indent(lines[first])
    end = first + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > indent:
        end += 1
    return "\n".join(lines[first:end])


def _without_archs(block: str) -> str:
    kept: list[str] = []
    inside = False
    for line in block.splitlines():
        if line.startswith("    archs:"):
            inside = True
            while kept[-1].startswith("    #"):  # the reason for these block sizes
                kept.pop()
        elif _indent(line) <= 4:
            inside = False
        if not inside:
            kept.append(line)
    return "\n".join(kept)


def _macros(lines: list[str], section: str) -> Iterable[tuple[str, str]]:
    """Name and text of each named expression of a section."""
    first = lines.index(f"{section}:") + 1
    for number, line in enumerate(lines[first:], first):
        if not line.startswith("  "):
            return
        found = re.match(r"  (\w+)(\(.*?\))?:", line)
        if found:
            yield found[1], _block(lines, number)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
