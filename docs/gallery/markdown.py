"""The gallery as pages of MkDocs: Markdown around pieces of HTML."""

from __future__ import annotations

from pathlib import PurePosixPath

from docs.gallery import pieces
from docs.gallery.cards import SHIPPED, Card, cards

FOLDER = "gallery"
"""Of the pages, below docs/."""

INTRODUCTION = (
    "Every variant of `variants.yaml`, whose kernels are in `generated/`, and of `library.yaml`, which one command "
    "renders. "
    "A card shows which pairs of query and key the variant keeps in a call of 1024 tokens with example arguments, "
    "its formulas, and the share of blocks that its kernels skip. "
)

STUDIO = "`python -m codegen studio` opens a page on which you can change an entry and see all of this change with it."


def pages() -> dict[str, str | bytes]:
    """Path below docs/ -> Markdown of a page, or a picture."""
    found = cards()
    files: dict[str, str | bytes] = {f"{FOLDER}/index.md": _index(found)}
    for card in found:
        files[f"{FOLDER}/{card.name}.md"] = _page(card)
        files |= {f"{FOLDER}/{path}": content for path, content in pieces.image_files(card).items()}
    return files


def _index(found: list[Card]) -> str:
    order = "\n".join(f"  - {card.name}" for card in found)
    head = f"---\ntitle: Gallery\nhide: [navigation, toc]\norder:\n{order}\n---\n# Gallery\n"
    assets = '<link rel="stylesheet" href="gallery.css"><script src="gallery.js" defer></script>'
    return "\n".join([head, INTRODUCTION + STUDIO, "", f"<div>{assets}{pieces.index(found)}</div>", ""])


def _page(card: Card) -> str:
    sections = [
        f"# {card.name}",
        f'<div class="ag"><link rel="stylesheet" href="gallery.css"><p>{pieces.prose(card.variant.doc)}</p>'
        f"{pieces.formulas(card)}{pieces.pictures(card)}{pieces.facts(card)}</div>",
        "## Entry",
        _fence("yaml", card.entry),
        "## Call",
        f'=== "PyTorch"\n\n{_indented(_fence("python", card.torch_call))}',
        f'=== "JAX"\n\n{_indented(_fence("python", card.jax_call))}',
        "## Kernels",
        _kernels(card),
    ]
    return "\n\n".join(sections) + "\n"


def _kernels(card: Card) -> str:
    """Links to the rendered files, or the command that renders them."""
    if card.file != SHIPPED:
        return f"{pieces.NOT_RENDERED}\n\n{_fence('sh', pieces.render_command(card))}"
    links = [f"[`{PurePosixPath(path).name}`](../../{path})" for path in card.kernels]
    return "Kernels, launches, ops and references of dense calls: " + ", ".join(links) + "."


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
