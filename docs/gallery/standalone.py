"""The gallery as HTML files that need nothing else: no MkDocs, no server, no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path, PurePosixPath

from codegen.inspect.highlight import python_html
from docs.gallery import pieces
from docs.gallery.cards import ROOT, SHIPPED, Card
from docs.gallery.markdown import INTRODUCTION, STUDIO

ASSETS = ("gallery.css", "gallery.js")


def html_files(cards: Sequence[Card], out: Path) -> dict[str, str | bytes]:
    """Path below `out` -> content of each file; links to kernels lead to the files of this checkout."""
    folder = Path(__file__).parent
    files: dict[str, str | bytes] = {name: (folder / name).read_text(encoding="utf-8") for name in ASSETS}
    introduction = pieces.prose(INTRODUCTION + STUDIO)
    files["index.html"] = _html("Gallery", f"<h1>Gallery</h1><p>{introduction}</p>{pieces.index(cards)}")
    for card in cards:
        files[f"{card.name}.html"] = _html(card.name, _page(card, out))
        files |= pieces.image_files(card)
    return files


def _page(card: Card, out: Path) -> str:
    return "".join(
        [
            f'<p><a href="index.html">Gallery</a></p><h1>{card.name}</h1>',
            f'<div class="ag"><p>{pieces.prose(card.variant.doc)}</p>',
            f"{pieces.formulas(card)}{pieces.pictures(card)}{pieces.facts(card)}</div>",
            f"<h2>Entry</h2><pre><code>{escape(card.entry.strip())}</code></pre>",
            f"<h2>Call in PyTorch</h2><pre><code>{python_html(card.torch_call.strip())}</code></pre>",
            f"<h2>Call in JAX</h2><pre><code>{python_html(card.jax_call.strip())}</code></pre>",
            f"<h2>Kernels</h2>{_kernels(card, out)}",
        ]
    )


def _kernels(card: Card, out: Path) -> str:
    if card.file != SHIPPED:
        command = escape(pieces.render_command(card))
        return f"<p>{pieces.NOT_RENDERED}</p><pre><code>{command}</code></pre>"
    links = [
        f'<a href="{escape(Path(os.path.relpath(ROOT / path, out)).as_posix())}">{PurePosixPath(path).name}</a>'
        for path in card.kernels
    ]
    return f"<p>Kernels, launches, ops and references of dense calls: {', '.join(links)}.</p>"


def _html(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} - attention-codegen</title>"
        '<link rel="stylesheet" href="gallery.css"><script src="gallery.js" defer></script></head>'
        f'<body class="ag-page"><main>{body}</main></body></html>\n'
    )
