"""The page that a demo writes at its end: one HTML file with the results, which loads no other file."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from codegen.load.spec_file import default_spec_path, load
from codegen.spec.model import Variant
from codegen.testing.golden import OUTPUTS, Checked

QUERIES = 1024
"""Query rows and keys of the pictures: with blocks of 64, as kernels have them, a picture has 16 by 16 squares."""

BLOCK = 64
CLASSES = ("e", "p", "f")
"""CSS classes of an empty, a partial and a full block, indexed by `codegen.inspect.block_status.Status`."""

CHART_WIDTH, CHART_HEIGHT, LEFT, BOTTOM = 640, 240, 40, 24

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2430; --soft: #5d6878; --line: #d9dee5; --good: #1f7a4d;
  --bad: #b3261e; --full: #2f6690; --partial: #e0a030; --empty: #eceff3; --a: #2f6690; --b: #c2571a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181e; --fg: #e4e9f0; --soft: #98a3b3; --line: #323a46;
  --good: #57c28c; --bad: #f2827a; --full: #5b9bd0; --partial: #d9a441; --empty: #262d37; --a: #6fb1e6;
  --b: #f0985c; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 66rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; } .soft, figcaption { color: var(--soft); }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; } svg { max-width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.own { text-align: left; }
td meter { width: 5rem; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.masks { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; } figcaption { font-size: .82rem; }
figcaption b { color: var(--fg); display: block; font-size: .95rem; }
code { font-size: .85em; overflow-wrap: anywhere; }
.e { fill: var(--empty); } .p { fill: var(--partial); } .f { fill: var(--full); }
.key i { border-radius: 2px; display: inline-block; height: .8em; margin: 0 .3em 0 1em; width: .8em; }
"""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One model's training: mean loss of equal parts of the run, in nats per byte, and the loss on held-out text."""

    name: str
    losses: Sequence[float]
    held_out: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a demo found. `checked` has an entry per variant and setting, `model` says what was trained."""

    title: str
    device: str
    is_right: bool
    checked: Sequence[Checked]
    model: str
    steps: int
    curves: Sequence[Curve]
    seconds: Mapping[str, float]


def write(path: Path, findings: Findings) -> None:
    """Write the page, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_page(findings)) + "\n", encoding="utf-8")


def _page(findings: Findings) -> Iterator[str]:
    title = escape(findings.title)
    verdict = '<span class="good">All is well</span>' if findings.is_right else '<span class="bad">Failed</span>'
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">'
    yield f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>'
    yield f"<style>{_STYLE}</style>\n<h1>{title}</h1>"
    parts = ", ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in findings.seconds.items())
    yield f'<p>{verdict} <span class="soft">on {escape(findings.device)}: {parts}</span></p>'
    yield from _errors(findings.checked)
    yield from _training(findings)
    yield from _masks()
    yield "</html>"


# -------------------------------------------------------------------------------------------------------------- errors


def _errors(checked: Sequence[Checked]) -> Iterator[str]:
    yield "<h2>Errors against float64</h2>"
    if not checked:
        yield '<p class="soft">The kernels did not run: they need Triton, which is not installed.</p>'
        return
    yield (
        "<p>Output, log of the denominator and every gradient of each variant's kernels: the largest error, as a "
        "fraction of the largest element. The bar compares the worst of a row with its bound, on a logarithmic "
        "scale.</p>"
    )
    for setting in dict.fromkeys(row.setting for row in checked):
        rows = [row for row in checked if row.setting == setting]
        yield f'<div class="wide"><table><caption class="soft">{escape(setting)}, bound {rows[0].bound:.0e}</caption>'
        heads = "".join(f"<th>{name}</th>" for name in (*OUTPUTS, "own gradients", "worst", "time"))
        yield f"<tr><th>variant</th>{heads}</tr>"
        for row in rows:
            yield _error_row(row)
        yield "</table></div>"


def _error_row(row: Checked) -> str:
    shared = "".join(f"<td>{row.errors[name]:.1e}</td>" for name in OUTPUTS)
    own = ", ".join(f"{escape(name)} {error:.1e}" for name, error in row.errors.items() if name not in OUTPUTS)
    # The bar begins at 1e-8 of the largest element, below float32's precision, and ends at the bound.
    worst = max(row.errors.values())
    share = 1.0 if not 0 < worst < math.inf else math.log(worst / 1e-8) / math.log(row.bound / 1e-8)
    bar = f'<meter min="0" max="1" high="0.999" value="{min(max(share, 0), 1):.2f}"></meter>'
    state = '<span class="good">OK</span>' if row.is_right else '<span class="bad">WRONG</span>'
    return (
        f'<tr><td>{escape(row.variant)}</td>{shared}<td class="own">{own}</td><td>{bar} {state}</td>'
        f"<td>{row.seconds:.1f} s</td></tr>"
    )


# ------------------------------------------------------------------------------------------------------------ training


def _training(findings: Findings) -> Iterator[str]:
    yield f"<h2>Training</h2><p>{escape(findings.model)}</p>"
    yield from _chart(findings.curves, findings.steps)
    yield '<div class="wide"><table><tr><th>attention</th><th>first loss</th><th>last loss</th>'
    yield "<th>held-out loss</th><th>time</th></tr>"
    for curve in findings.curves:
        seconds = "evaluated only" if curve.seconds is None else f"{curve.seconds:.1f} s"
        first, last = (f"{curve.losses[i]:.3f}" if curve.losses else "" for i in (0, -1))
        yield (
            f"<tr><td>{escape(curve.name)}</td><td>{first}</td><td>{last}</td><td>{curve.held_out:.4f}</td>"
            f"<td>{seconds}</td></tr>"
        )
    yield '</table></div><p class="soft">Losses are in nats per byte; 8 bits, no knowledge at all, are 5.55.</p>'


def _chart(curves: Sequence[Curve], steps: int) -> Iterator[str]:
    drawn = [curve for curve in curves if len(curve.losses) > 1]
    values = [loss for curve in drawn for loss in curve.losses if math.isfinite(loss)]
    if not values:
        return
    low, high = math.floor(min(values)), math.ceil(max(values))
    right, top = CHART_WIDTH - 8, 8

    def y_of(loss: float) -> float:
        return top + (high - loss) / max(high - low, 1) * (CHART_HEIGHT - BOTTOM - top)

    yield f'<div class="wide"><svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" width="{CHART_WIDTH}" role="img">'
    yield "<title>Training loss by step</title>"
    for tick in range(low, high + 1):
        y = y_of(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="var(--line)"/><text x="8" y="{y + 4:.1f}">{tick}</text>'
    for step in (0, steps // 2, steps):
        x = LEFT + step / steps * (right - LEFT)
        anchor = "start" if step == 0 else "end" if step == steps else "middle"
        yield f'<text x="{x:.0f}" y="{CHART_HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>'
    for number, curve in enumerate(drawn):
        # Each point is drawn in the middle of the part of the run over which it is the mean.
        places = [LEFT + (i + 0.5) / len(curve.losses) * (right - LEFT) for i in range(len(curve.losses))]
        points = " ".join(f"{x:.1f},{y_of(loss):.1f}" for x, loss in zip(places, curve.losses, strict=True))
        color, dash = ("var(--a)", "") if number == 0 else ("var(--b)", ' stroke-dasharray="6 4"')
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        y = top + 14 + 18 * number
        yield f'<path d="M{right - 210} {y}h24" stroke="{color}" stroke-width="2"{dash}/>'
        yield f'<text x="{right - 180}" y="{y + 4}">{escape(curve.name)}</text>'
    yield "</svg></div>"


# --------------------------------------------------------------------------------------------------------------- masks


def _masks() -> Iterator[str]:
    yield "<h2>Masks</h2>"
    if importlib.util.find_spec("numpy") is None:
        yield '<p class="soft">No pictures: numpy is not installed.</p>'
        return
    yield f"<p>Blocks of {BLOCK} by {BLOCK} of a call with {QUERIES} queries (down) and {QUERIES} keys (across), "
    yield "with each variant's example arguments. An empty block is never visited, a full one is computed without its "
    yield "mask."
    keys = zip(("empty", "partial", "full"), ("not visited", "masked", "no mask"), strict=True)
    swatches = "".join(f'<i style="background:var(--{name})"></i>{name}: {what}' for name, what in keys)
    yield f'<span class="key soft">{swatches}</span></p><div class="masks">'
    for variant in load(default_spec_path()).variants.values():
        yield _mask(variant)
    yield "</div>"


def _mask(variant: Variant) -> str:
    from codegen.inspect.block_status import Grid
    from codegen.inspect.call import make_call
    from codegen.inspect.show import picture

    call = make_call(variant, q_len=QUERIES, kv_len=QUERIES, q_offset=0, batch=0, head=0, scalars={}, files={})
    found = picture(variant, [Grid(call=call, block_m=BLOCK, block_n=BLOCK)])
    blocks = found.proven
    rows, columns = blocks.shape
    shapes = []
    for row in range(rows):
        column = 0
        while column < columns:
            end = column
            while end < columns and blocks[row, end] == blocks[row, column]:
                end += 1
            name = CLASSES[int(blocks[row, column])]
            shapes.append(f'<path class="{name}" d="M{column} {row}h{end - column}v1h{column - end}z"/>')
            column = end
    skipped = 100 * float((blocks == 0).mean())
    text = variant.mask_text or "every pair"
    score = f"<br><code>{escape(variant.score_text)}</code>" if variant.score_text else ""
    return (
        f'<figure><svg viewBox="0 0 {columns} {rows}" role="img" shape-rendering="crispEdges">'
        f"<title>{escape(variant.name)}</title>{''.join(shapes)}</svg><figcaption><b>{escape(variant.name)}</b>"
        f"<code>{escape(text)}</code>{score}<br>{skipped:.0f} % of blocks not visited</figcaption></figure>"
    )
