"""Fenced blocks and links of the repository's Markdown files, as docs/README.md describes them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

_BLOCK = re.compile(
    r"(?P<note>^[ ]*<!-- not run: .+? -->\n+)?"
    r"^(?P<indent>[ ]*)(?P<fence>`{3,})(?P<language>\w*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page: its language, the file that its title names, its first line, and whether it runs."""

    page: Path
    language: str
    title: str
    line: int
    text: str
    is_run: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def shows(self) -> Path | None:
        """The file of the checkout that the block is a part of, if its title names one."""
        path = ROOT / self.title
        return path if self.title and path.is_file() else None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, also those in tabs and lists, without their indentation."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, match) for match in _BLOCK.finditer(text)]


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    title = _TITLE.search(match["rest"])
    return Block(
        page=page,
        language=match["language"],
        title=title[1] if title else "",
        line=text.count("\n", 0, match.start("text")) + 1,
        text=textwrap.dedent(match["text"]),
        is_run=match["note"] is None,
    )


def commands(block: Block) -> Iterator[str]:
    """The command lines of a block of bash, or of a console, where they follow a `$`."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    yield from (line for line in lines if line.strip() and not line.startswith("#"))


def pages() -> list[Path]:
    """README.md and the pages of the site that are written by hand."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted(path for path in docs.rglob("*.md") if path != docs / "README.md")]
