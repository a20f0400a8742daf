"""The picture at the top of README.md: an entry, the blocks that its mask leaves, and the files rendered from it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from codegen.inspect.block_status import Grid, Status, proven
from codegen.inspect.call import make_call
from codegen.load.spec_file import load
from docs.generators import ROOT
from docs.generators.charts import DARK, Scheme

VARIANT, LENGTH, BLOCK = "streaming_llm", 1024, 64

ENTRY = (
    "streaming_llm:",
    "  mask: causal and (window(size)",
    "                    or prefix(sinks))",
    "  scalars:",
    "    size: {type: int, min: 1}",
    "    sinks: {type: int, min: 0}",
)
"""The entry of the variant, without its examples, as the lines of the picture."""

RENDERED = (
    ("portable.py", "forward, backward"),
    ("hopper_fwd.py", "o and lse, sm_90"),
    ("hopper_bwd.py", "gradients, sm_90"),
    ("torch_op.py", "autograd, compile"),
    ("jax_op.py", "jit, grad, vmap"),
)

WIDTH, HEIGHT, TOP, CELL = 860, 262, 44, 10.5


def statuses() -> Sequence[Sequence[int]]:
    """The status of each block of the example's call, as block analysis proves it."""
    variant = load(ROOT / "variants.yaml").variants[VARIANT]
    call = make_call(
        variant,
        q_len=LENGTH,
        kv_len=LENGTH,
        q_offset=0,
        batch=0,
        head=0,
        scalars={"size": "256", "sinks": "4"},
        files={},
    )
    assert variant.mask is not None
    found: Sequence[Sequence[int]] = proven(variant.mask, Grid(call=call, block_m=BLOCK, block_n=BLOCK)).tolist()
    return found


def entry_picture(scheme: Scheme) -> str:
    """The picture as SVG."""
    empty, partial, full = ("#30363d", "#b08800", "#56b4e9") if scheme is DARK else ("#eef1f4", "#e6a23c", "#0072b2")
    colours = {Status.EMPTY: empty, Status.PARTIAL: partial, Status.FULL: full}
    parts = [_words(0, 20, "An entry of variants.yaml", scheme.text, weight=600)]
    parts += [_words(0, TOP + 34 + 21 * i, line, scheme.text, mono=True) for i, line in enumerate(ENTRY)]
    grid = statuses()
    left = 340.0
    parts.append(_words(left, 20, "Its blocks: 1024 tokens, size 256", scheme.text, weight=600))
    for i, row in enumerate(grid):
        for j, status in enumerate(row):
            x, y = left + j * CELL, TOP + i * CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colours[Status(status)]}"/>'
            )
    for i, (status, name) in enumerate(((Status.EMPTY, "skipped"), (Status.PARTIAL, "masked"), (Status.FULL, "whole"))):
        x, y = left + 68 * i, TOP + len(grid) * CELL + 14
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colours[status]}"/>')
        parts.append(_words(x + 15, y + 9.5, name, scheme.faint, size=12))
    left = 620.0
    parts.append(_words(left, 20, "Plain source, no generator needed", scheme.text, weight=600))
    for i, (file, what) in enumerate(RENDERED):
        y = TOP + 34 + 27 * i
        parts.append(_words(left, y, file, scheme.passes[0] if i < 3 else scheme.passes[1], mono=True))
        parts.append(_words(left + 106, y, what, scheme.faint, size=12.5))
    for x in (296.0, 560.0):
        parts.append(
            f'<path d="M{x} {TOP + 84} h24 m-8 -6 l8 6 l-8 6" fill="none" stroke="{scheme.faint}" stroke-width="2"/>'
        )
    title = "An entry, the blocks that its mask leaves, and the files that are rendered"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n<title>{title}</title>\n{body}\n</svg>\n'
    )


def _words(
    x: float, y: float, words: str, colour: str, *, mono: bool = False, weight: int = 400, size: float = 13.5
) -> str:
    sans, fixed = "-apple-system, Segoe UI, Helvetica, Arial, sans-serif", "SFMono-Regular, Consolas, Menlo, monospace"
    family = fixed if mono else sans
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-family="{family}" font-size="{size - (0.5 if mono else 0)}" '
        f'font-weight="{weight}" xml:space="preserve">{html.escape(words)}</text>'
    )
