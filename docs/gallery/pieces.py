"""The HTML that both shells of the gallery share: cards, formulas, pictures and facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from codegen.analysis.schedule import Schedule
from codegen.inspect.block_status import Status
from codegen.inspect.kinds import SCHEDULES
from codegen.inspect.mathematics import Formula
from codegen.spec.model import describe_tensor
from docs.gallery.cards import ALL_KINDS, PACKAGES, SHIPPED, Card

IMAGES = "images"
"""The folder of the pictures, beside the pages."""


def pairs_path(card: Card) -> str:
    """The picture of the pairs, from a page of the gallery."""
    return f"{IMAGES}/{card.name}.pairs.png"


def blocks_path(card: Card) -> str:
    """The picture of the blocks, from a page of the gallery."""
    return f"{IMAGES}/{card.name}.blocks.svg"


def image_files(card: Card) -> dict[str, str | bytes]:
    """Path beside the pages -> content."""
    return {pairs_path(card): card.portrait.pairs, blocks_path(card): card.portrait.blocks}


def percent(share: float) -> str:
    """A share that never rounds a little to none or nearly all to all."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def prose(text: str) -> str:
    """The `doc` of a variant: code between backticks, arXiv numbers as links."""
    found = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(" ".join(text.split())))
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', found)


def formulas(card: Card) -> str:
    """The formulas, a row each, and the legend of their symbols."""
    rows = "".join(
        f'<div class="ag-formula"><span class="ag-label">{f.label}</span><div class="ag-math">{f.element}</div></div>'
        for f in card.formulas
    )
    legend = ", ".join(f"{symbol}&nbsp;{escape(meaning)}" for symbol, meaning in card.legend)
    return f'<div class="ag-formulas">{rows}</div>' + (f'<p class="ag-note">{legend}</p>' if legend else "")


def pictures(card: Card) -> str:
    """The pairs and the blocks beside each other, with a legend."""
    view = card.portrait.view
    size = f"{view.q_len} queries, from top to bottom, by {view.kv_len} keys"
    figures = [
        (pairs_path(card), "Pairs that the mask keeps", f"Pairs: {size}"),
        (blocks_path(card), "Blocks that are visited", f"Blocks of {view.block_m} by {view.block_n} of the same call"),
    ]
    shown = "".join(
        f'<figure><img src="{path}" alt="{title} of {card.name}" width="256" height="256"><figcaption>{caption}'
        "</figcaption></figure>"
        for path, title, caption in figures
    )
    return f'<div class="ag-pictures">{shown}</div>{LEGEND}'


LEGEND = (
    '<p class="ag-note ag-legend"><span class="ag-empty"></span> empty: skipped '
    '<span class="ag-partial"></span> partial: masked <span class="ag-full"></span> full: no mask</p>'
)


def facts(card: Card) -> str:
    """The table of schedule, shares and arguments."""
    portrait = card.portrait
    shares = ", ".join(f"{percent(portrait.share(status))} {status.name.lower()}" for status in Status)
    rows = {
        "Schedule": f"<code>{portrait.schedule}</code>: {SCHEDULES[portrait.schedule]}",
        "Blocks": f"{shares}; the empty ones are skipped",
        "Pairs kept": percent(portrait.kept),
        "Same numbers": f"<code>{escape(card.show_command)}</code>",
        "Tensors": _listed([describe_tensor(tensor) for tensor in card.variant.tensors.values()]),
        "Scalars": _listed([f"{s.name}: {s.type.value}" for s in card.variant.scalars.values()]),
        "Kinds": _listed([f"{kind}: {ALL_KINDS[kind]}" for kind in card.kinds], tag="span"),
        "Source": ", ".join(f'<a href="{escape(url)}">{escape(title)}</a>' for title, url in card.sources),
    }
    shown = "".join(f"<tr><th>{label}</th><td>{text}</td></tr>" for label, text in rows.items() if text)
    return f'<table class="ag-facts"><tbody>{shown}</tbody></table>'


def _listed(items: Sequence[str], tag: str = "code") -> str:
    return "<br>".join(f"<{tag}>{escape(item)}</{tag}>" for item in items)


NOT_RENDERED = "This variant of the library is not rendered in the repository. The command that renders all of them:"


def render_command(card: Card) -> str:
    """The command that renders the package of a card's spec file."""
    return f"python -m codegen render --variants {card.file} --out {PACKAGES[card.file]}"


# ------------------------------------------------------------------------------------------------------------ the index


def index(cards: Sequence[Card]) -> str:
    """The filters, which a script shows, and a card for each variant."""
    return f'<div class="ag">{_filters(cards)}<div class="ag-grid">{"".join(map(_card, cards))}</div></div>'


def _filters(cards: Sequence[Card]) -> str:
    used = [kind for kind in ALL_KINDS if any(kind in card.kinds for card in cards)]
    chips = "".join(
        f'<button type="button" class="ag-chip" data-kind="{kind}" aria-pressed="false" '
        f'title="{escape(ALL_KINDS[kind])}">{kind}</button>'
        for kind in used
    )
    schedules = "".join(f'<option value="{s}">{s}</option>' for s in Schedule)
    return (
        '<div class="ag-filters" hidden>'
        '<input type="search" class="ag-search" placeholder="Search names, texts and formulas" aria-label="Search">'
        f'<select class="ag-schedule" aria-label="Schedule"><option value="">any schedule</option>{schedules}</select>'
        f'<div class="ag-chips">{chips}</div>'
        f'<p class="ag-count" role="status">{len(cards)} variants</p></div>'
    )


def _main(card: Card) -> list[Formula]:
    """The formulas of mask and score: what is special in the softmax has room on the variant's own page."""
    labels = {"score", *(["mask"] if card.variant.mask is not None else [])}
    return [formula for formula in card.formulas if formula.label in labels]


def _card(card: Card) -> str:
    words = f"{card.name} {card.variant.doc} {card.variant.mask_text} {card.variant.score_text} {card.file}"
    data = f'data-kinds="{",".join(card.kinds)}" data-schedule="{card.portrait.schedule}"'
    search = f'data-words="{escape(" ".join(words.lower().split()))}"'
    tags = "".join(f'<span class="ag-tag">{kind}</span>' for kind in card.kinds)
    rendered = "rendered" if card.file == SHIPPED else "library"
    shown = "".join(f'<div class="ag-math">{formula.element}</div>' for formula in _main(card))
    skipped = (
        f"skips {percent(card.portrait.skipped)} of its blocks" if card.variant.mask is not None else "skips nothing"
    )
    return (
        f'<article class="ag-card" {data} {search}>'
        f'<a class="ag-thumb" href="{card.name}.html"><img src="{pairs_path(card)}" alt="" width="112" height="112" '
        f'loading="lazy"></a><div class="ag-text"><h3><a href="{card.name}.html">{card.name}</a></h3>'
        f"<p>{prose(card.variant.doc)}</p>{shown}"
        f'<p class="ag-note">{skipped} · <code>{card.portrait.schedule}</code> · {rendered}</p>'
        f'<p class="ag-tags">{tags}</p></div></article>'
    )
