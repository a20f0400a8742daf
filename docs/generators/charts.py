"""Charts as SVG, drawn without a library: a dot for each measured ratio, in colours of a light or a dark page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from docs.generators.runs import geometric_mean


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The colours of a chart."""

    name: str
    text: str
    faint: str
    grid: str
    loss: str
    passes: tuple[str, str]


# Okabe and Ito's orange and blue, which colour-blind readers tell apart; lighter ones on a dark page.
LIGHT = Scheme(
    name="light", text="#1f2328", faint="#59636e", grid="#d1d9e0", loss="#fbe3d6", passes=("#0072b2", "#d55e00")
)
DARK = Scheme(
    name="dark", text="#f0f6fc", faint="#9198a1", grid="#3d444d", loss="#4a2a1c", passes=("#56b4e9", "#f2a35e")
)
SCHEMES = (LIGHT, DARK)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of dots: `ratios` of a pass (`which`: 0 forward, 1 backward) against the peer that `label` names."""

    label: str
    of: str
    which: int
    ratios: Sequence[float]


LEFT, WIDTH, TOP, STEP = 190, 760, 62, 26
FARTHEST = 8.0
"""The end of the axis. Larger ratios are written as text there, because one large ratio would squeeze all others."""
_TICKS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


def ratio_chart(title: str, rows: Sequence[Row], scheme: Scheme) -> str:
    """How many times as long each peer takes, on a logarithmic axis; the part where ours is slower is shaded."""
    values = [ratio for row in rows for ratio in row.ratios]
    low, high = min(0.8, *values) / 1.06, min(max(1.5, *values), FARTHEST) * 1.06
    height = TOP + STEP * len(rows) + 42

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - 64) * math.log(ratio / low) / math.log(high / low)

    bottom = TOP + STEP * len(rows)
    parts = [
        f'<rect x="{x(low):.1f}" y="{TOP}" width="{x(1) - x(low):.1f}" height="{bottom - TOP}" fill="{scheme.loss}"/>',
        _text(0, 18, title, scheme.text, size=15, weight=600),
        *_legend(scheme),
    ]
    for tick in _TICKS:
        if low < tick < high and (high / low < 6 or tick not in (0.75, 1.25)):
            colour, width = (scheme.text, 1.4) if tick == 1 else (scheme.grid, 0.8)
            parts.append(_line(x(tick), TOP, x(tick), bottom, colour, width))
            parts.append(_text(x(tick), bottom + 17, f"{tick:g}", scheme.faint, anchor="middle"))
    parts.append(_text(LEFT, bottom + 35, "the peer's time over ours; shaded: ours is slower", scheme.faint))
    before = ""
    for i, row in enumerate(rows):
        y = TOP + STEP * i + STEP / 2
        if row.label != before:
            parts.append(_text(0, y + 4, row.label, scheme.text, weight=600))
            parts.append(_text(0, y + 4 + STEP * 0.7, row.of, scheme.faint, size=11))
            before = row.label
            if i:
                parts.append(_line(0, TOP + STEP * i, WIDTH, TOP + STEP * i, scheme.grid, 0.8))
        parts += [
            f'<circle cx="{x(ratio):.1f}" cy="{y:.1f}" r="4" fill="{scheme.passes[row.which]}" fill-opacity=".55"/>'
            for ratio in row.ratios
            if ratio <= FARTHEST
        ]
        if beyond := sorted(ratio for ratio in row.ratios if ratio > FARTHEST):
            words = "and " + ", ".join(f"{ratio:.0f}" for ratio in beyond)
            parts.append(_text(x(high), y + 4, words, scheme.passes[row.which], anchor="end", size=11))
        mean = geometric_mean(list(row.ratios))
        parts.append(_line(x(mean), y - 8, x(mean), y + 8, scheme.passes[row.which], 2.5))
        parts.append(_text(WIDTH, y + 4, f"{mean:.2f}", scheme.passes[row.which], anchor="end", weight=600))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12.5" role="img">\n'
        f"<title>{html.escape(title)}</title>\n{body}\n</svg>\n"
    )


def _legend(scheme: Scheme) -> list[str]:
    parts = []
    for i, name in enumerate(("forward", "backward")):
        at = LEFT + 90 * i
        parts.append(f'<circle cx="{at + 4}" cy="42" r="4" fill="{scheme.passes[i]}"/>')
        parts.append(_text(at + 14, 46, name, scheme.text))
    parts.append(_text(WIDTH, 46, "geometric mean", scheme.faint, anchor="end"))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, words: str, colour: str, *, anchor: str = "start", weight: int = 400, size: float = 12.5
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{html.escape(words)}</text>'
    )
