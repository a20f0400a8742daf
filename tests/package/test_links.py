"""Links of every Markdown file of the repository lead to files and headings that exist; no test uses the network."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from docs.generators import generated_pages
from docs.generators.sources import is_local, links
from tests.support.paths import ROOT

_IMAGE = re.compile(r'<(?:img|source)\b[^>]*?(?:src|srcset)="([^"]+)"')
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{#([\w-]+)\})? *$", re.MULTILINE)
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)


def markdown_files() -> list[Path]:
    """The Markdown files of the checkout that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("no git checkout, so no list of its files")
    return [path for name in found.stdout.split() if (path := ROOT / name).is_file()]


@cache
def generated() -> dict[Path, str]:
    """The pages that the site's build adds, by the paths that they would have."""
    return {ROOT / "docs" / name: text if isinstance(text, str) else "" for name, text in generated_pages().items()}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, spelled as GitHub and the site spell them."""
    text = generated()[page] if page in generated() else page.read_text(encoding="utf-8")
    return frozenset(name or slug(title) for title, name in _HEADING.findall(_FENCE.sub("", text)))


def slug(title: str) -> str:
    """The anchor of a heading.

    >>> slug("How a `call` chooses: tiles, *families*")
    'how-a-call-chooses-tiles-families'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


def problems(page: Path) -> list[str]:
    """The links of a file that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    found = []
    for target in [*links(text), *_IMAGE.findall(text)]:
        path, _, anchor = target.partition("#")
        if not (is_local(target) or target.startswith("#")) or anchor.startswith("only-"):
            continue
        where = (page.parent / path).resolve() if path else page
        is_there = where.exists() or where in generated()
        has_anchor = not anchor or where.suffix != ".md" or (is_there and anchor in anchors(where))
        if not is_there or not has_anchor:
            found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def test_links_lead_to_files_and_headings() -> None:
    pytest.importorskip("yaml", reason="pages are generated from the specs")
    files = markdown_files()
    assert len(files) > 15
    assert not [problem for page in files for problem in problems(page)]


def test_link_to_a_missing_heading_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.package.test_links.ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# A page\n[good](#a-page) [bad](#b) [gone](b.md) `[code](c.md)`\n", encoding="utf-8")
    assert problems(page) == ["a.md: #b", "a.md: b.md"]
