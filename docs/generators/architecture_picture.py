"""The picture of ARCHITECTURE.md: how an entry becomes a package."""

from __future__ import annotations

import html
from dataclasses import dataclass

from docs.generators.charts import Scheme

WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 880, 330, 150, 54


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box with a title and a line of text below it; `x` and `y` are the upper left corner."""

    x: int
    y: int
    title: str
    text: str


BOXES = {
    "spec": Box(x=1, y=140, title="variants.yaml", text="masks, scores, sizes"),
    "load": Box(x=190, y=40, title="load", text="YAML, errors with lines"),
    "ir": Box(x=190, y=140, title="ir", text="parse, derive, print"),
    "analysis": Box(x=190, y=240, title="analysis", text="blocks, gradient kinds"),
    "plan": Box(x=375, y=140, title="plan", text="kernels and ops, decided"),
    "templates": Box(x=375, y=240, title="templates/, runtime/", text="Jinja, plain Python"),
    "render": Box(x=560, y=140, title="render", text="fill, format, hash"),
    "kernels": Box(x=728, y=40, title="VARIANT/*.py", text="kernels for each mode"),
    "ops": Box(x=728, y=140, title="torch, jax, packing", text="ops, shared runtime"),
    "tuned": Box(x=728, y=240, title="tuned/GPU/*.json", text="from codegen tune"),
}

ARROWS = (
    ("spec", "load"),
    ("load", "ir"),
    ("ir", "analysis"),
    ("ir", "plan"),
    ("analysis", "plan"),
    ("plan", "render"),
    ("templates", "render"),
    ("render", "kernels"),
    ("render", "ops"),
    ("tuned", "ops"),
)

AREAS = (
    (430, "M175 24 H702 V210 H360 V318 H175 Z", "codegen/: no framework, no GPU"),
    (798, "M716 24 H880 V318 H716 Z", "the package: no generator"),
)
"""The shaded areas behind some boxes: the middle of the title, the outline, and the title."""


def architecture_picture(scheme: Scheme) -> str:
    """The picture as SVG."""
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{scheme.faint}"/></marker></defs>'
    ]
    for middle, outline, name in AREAS:
        parts.append(f'<path d="{outline}" fill="{scheme.grid}" fill-opacity=".25"/>')
        parts.append(_words(middle, 14, name, scheme.faint, size=12))
    parts += [_arrow(BOXES[start], BOXES[end], scheme) for start, end in ARROWS]
    for box in BOXES.values():
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{_width(box)}" height="{BOX_HEIGHT}" rx="6" fill="none" '
            f'stroke="{scheme.passes[0]}" stroke-width="1.5"/>'
        )
        centre = box.x + _width(box) / 2
        parts.append(_words(centre, box.y + 23, box.title, scheme.text, weight=600))
        parts.append(_words(centre, box.y + 42, box.text, scheme.faint, size=11.5))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>How an entry becomes a package</title>\n{body}\n</svg>\n"
    )


def _width(box: Box) -> int:
    return {1: 140, 560: 130}.get(box.x, BOX_WIDTH)


def _arrow(start: Box, end: Box, scheme: Scheme) -> str:
    if start.x == end.x:  # one box is above the other
        x1 = x2 = start.x + _width(start) // 2
        y1, y2 = (start.y + BOX_HEIGHT, end.y) if start.y < end.y else (start.y, end.y + BOX_HEIGHT)
    else:
        x1, x2 = start.x + _width(start), end.x
        y1, y2 = start.y + BOX_HEIGHT // 2, end.y + BOX_HEIGHT // 2
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2 - (1 if x1 != x2 else 0)}" y2="{y2}" stroke="{scheme.faint}" '
        f'stroke-width="1.3" marker-end="url(#tip)"/>'
    )


def _words(x: float, y: float, words: str, colour: str, *, weight: int = 400, size: float = 13) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="middle" font-weight="{weight}" font-size="{size}">'
        f"{html.escape(words)}</text>"
    )
