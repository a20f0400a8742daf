"""The gallery: every variant has a card and a page, links and pictures resolve, and the filters work in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from codegen.inspect.kinds import KINDS
from codegen.load.spec_file import load
from docs.gallery.cards import ALL_KINDS, Card, cards
from docs.gallery.facts import ON_CANVAS, SOURCES, VIEWS
from docs.gallery.markdown import pages
from docs.gallery.standalone import html_files
from tests.support.browser import Page, find_browser
from tests.support.paths import DEFAULT_SPEC, LIBRARY, ROOT

NAMES = [*load(DEFAULT_SPEC).variants, *load(LIBRARY).variants]

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")


@pytest.fixture(scope="module")
def found() -> list[Card]:
    return cards()


@pytest.fixture(scope="module")
def folder(found: list[Card], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gallery")
    for path, content in html_files(found, out).items():
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return out


class Links(HTMLParser):
    """The addresses in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]


def test_every_variant_has_a_card(found: list[Card]) -> None:
    assert [card.name for card in found] == NAMES
    assert all(card.sources for card in found)
    assert all(set(card.kinds) <= set(ALL_KINDS) for card in found)
    assert set(KINDS) <= {kind for card in found for kind in card.kinds}
    kernels = {card.name: card.kernels for card in found}
    assert "generated/alibi/paged/portable.py" in kernels["alibi"]
    assert not any("/paged/" in path for path in kernels["causal_dropout"])


def test_tables_beside_the_generator_name_variants() -> None:
    assert set(SOURCES) | set(VIEWS) <= set(NAMES)
    assert all(any(name.startswith(start) for name in NAMES) for start in ON_CANVAS)


def test_rendered_variants_link_their_kernels(found: list[Card]) -> None:
    rendered = set(load(DEFAULT_SPEC).variants)
    for card in found:
        assert bool(card.kernels) == (card.name in rendered)
        assert all((ROOT / path).is_file() for path in card.kernels)
    alibi = next(card for card in found if card.name == "alibi")
    assert {"generated/alibi/portable.py", "generated/alibi/hopper_bwd.py"} <= set(alibi.kernels)


def test_every_link_of_the_html_resolves(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.suffix == ".html"]
    assert len(files) == len(NAMES) + 1
    for path in files:
        addresses = Links(path.read_text(encoding="utf-8")).addresses
        assert addresses
        for address in addresses:
            if not address.startswith("https://"):
                assert (folder / address).exists(), f"{path.name}: {address}"


def test_the_index_lists_every_variant_without_a_script(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<article class="ag-card".*?<h3><a href="(\w+)\.html">', text) == NAMES
    assert '<div class="ag-filters" hidden>' in text


def test_pages_of_mkdocs_hold_entries_calls_and_links(found: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.gallery.markdown.cards", lambda: found)
    files = pages()
    assert {path for path in files if path.endswith(".md")} == {f"gallery/{name}.md" for name in ("index", *NAMES)}
    for name in NAMES:
        text = files[f"gallery/{name}.md"]
        assert isinstance(text, str)
        assert f"# {name}\n" in text
        assert text.count("```") >= 6
        assert f".torch import {name}" in text
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert (ROOT / "docs" / "gallery" / link).is_file()
        for address in Links(text).addresses:
            if not address.startswith("https://"):
                assert f"gallery/{address}" in files or (ROOT / "docs" / "gallery" / address).is_file()


def test_the_command_writes_the_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs.gallery", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"open {tmp_path / 'out' / 'index.html'}" in result.stdout
    assert (tmp_path / "out" / "images" / "alibi.pairs.png").is_file()


def test_a_file_in_the_place_of_the_folder_is_one_error() -> None:
    command = [sys.executable, "-m", "docs.gallery", "README.md"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.endswith("error: OUT: expected a folder, got the file README.md\n")


@needs_browser
def test_filters_in_a_browser(folder: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    url = f"{(folder / 'index.html').as_uri()}#kinds=decay"
    with Page(BROWSER, url, tmp_path, width=390, dark=True) as page:
        count = "document.querySelector('.ag-count').textContent"
        names = "[...document.querySelectorAll('.ag-card:not([hidden]) h3')].map((h) => h.textContent)"
        page.wait_for(f"{count} === '2 of {len(NAMES)} variants'")
        assert page.value(names) == ["forgetting", "forgetting_window"]
        page.type_into(".ag-search", "size")
        page.wait_for(f"{count} === '1 of {len(NAMES)} variants'")
        assert page.value(names) == ["forgetting_window"]
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value("location.hash") == "#q=size&kinds=decay"
        assert page.errors == []
