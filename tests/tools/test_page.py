"""The page that the demos end with."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

from codegen.load.spec_file import load
from codegen.testing.golden import Checked, read_checked, write_checked
from examples.page import Curve, Findings, write
from tests.support.paths import ROOT

MOST_BYTES = 60_000
VOID = ("meta", "path", "polyline", "br", "link", "img")


def row(variant: str, error: float) -> Checked:
    errors = {"o": error, "lse": 1e-7, "dq": 1e-7, "dk": 1e-7, "dv": 1e-7, "dslope": 2e-7}
    return Checked(variant=variant, setting="float32, B1", errors=errors, bound=2e-5, seconds=0.5)


def page(folder: Path, *, error: float = 3e-7, curves: int = 2) -> str:
    findings = Findings(
        title="Generated <attention>",
        device="the CPU",
        is_right=error < 2e-5,
        checked=[row("causal", 1e-7), row("alibi", error)],
        model="A model.",
        steps=200,
        curves=[
            Curve(name="ours", losses=[5.0, 3.5, 2.5], held_out=2.6, seconds=3.0),
            Curve(name="theirs", losses=[5.0, 3.6, 2.4] if curves == 2 else [], held_out=2.6, seconds=None),
        ],
        seconds={"kernels": 60.0, "training": 3.0},
    )
    write(folder / "new" / "demo.html", findings)
    return (folder / "new" / "demo.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Checks that tags are closed in the reverse order of their opening."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.references += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_the_page_is_one_small_well_formed_file(tmp_path: Path) -> None:
    text = page(tmp_path)
    reader = read(text)
    assert reader.references == []
    assert "url(" not in text
    assert "@import" not in text
    assert len(text.encode()) < MOST_BYTES
    assert "prefers-color-scheme: dark" in text


def test_it_shows_errors_losses_and_the_mask_of_every_variant(tmp_path: Path) -> None:
    text = page(tmp_path)
    reader = read(text)
    variants = load(ROOT / "variants.yaml").variants
    assert reader.seen["figure"] == len(variants)
    assert all(f"<b>{name}</b>" in text for name in variants)
    assert reader.seen["polyline"] == 2
    assert "3.0e-07" in text
    assert "dslope 2.0e-07" in text
    assert "Generated &lt;attention&gt;" in text
    assert "All is well" in text
    # The blocks above the diagonal of 16 by 16 blocks.
    assert "47 % of blocks not visited" in text.partition("<b>causal</b>")[2].partition("</figure>")[0]


def test_a_wrong_variant_is_seen(tmp_path: Path) -> None:
    for error in (1.0, math.nan):
        text = page(tmp_path, error=error)
        assert text.count("WRONG") == 1
        assert "Failed" in text


def test_a_model_that_was_only_evaluated_has_no_curve(tmp_path: Path) -> None:
    text = page(tmp_path, curves=1)
    assert read(text).seen["polyline"] == 1
    assert "evaluated only" in text


def test_checked_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [row("causal", 1e-7), row("alibi", 2.0)]
    write_checked(tmp_path / "rows.json", rows)
    assert read_checked(tmp_path / "rows.json") == rows
    assert [r.is_right for r in rows] == [True, False]
    assert read_checked(tmp_path / "absent.json") == []
    assert json.loads((tmp_path / "rows.json").read_text())[0]["variant"] == "causal"
