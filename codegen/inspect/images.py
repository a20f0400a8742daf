"""Small pictures of a mask for web pages: blocks as SVG, pairs as PNG.

Empty blocks and pairs are transparent, and the colours are readable on light and on dark pages.
"""

from __future__ import annotations

import base64
import io
from itertools import groupby

import numpy as np
from PIL import Image

from codegen.inspect.block_status import Status
from codegen.ir.evaluate import Array

COLORS = {Status.PARTIAL: "#e0922f", Status.FULL: "#3d85c6"}
"""Status of a block -> its colour. Kept pairs have the colour of full blocks."""

MOST_CELLS = 256
"""Longest side of a picture of pairs. If there are more pairs, a cell shows the share that is kept."""

_SHADES = 16
"""Steps of the share of kept pairs in a cell."""


def blocks_svg(statuses: Array) -> str:
    """The blocks of a call as an SVG element, as wide and as high as its container allows."""
    rows, columns = statuses.shape
    paths = {status: "".join(_runs(statuses, status)) for status in COLORS}
    filled = "".join(f'<path fill="{COLORS[status]}" d="{path}"/>' for status, path in paths.items() if path)
    lines = "".join(f"M{x} 0V{rows}" for x in range(columns + 1)) + "".join(
        f"M0 {y}H{columns}" for y in range(rows + 1)
    )
    width = 4 / max(rows, columns) / 4
    grid = f'<path d="{lines}" fill="none" stroke="#808080" stroke-opacity=".45" stroke-width="{width:.4g}"/>'
    box = f"{-width:.4g} {-width:.4g} {columns + 2 * width:.4g} {rows + 2 * width:.4g}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{filled}{grid}</svg>'


def _runs(statuses: Array, status: Status) -> list[str]:
    """Path commands for the runs of blocks of one status in each row."""
    found = []
    for y, row in enumerate(statuses):
        x = 0
        for value, run in groupby(row.tolist()):
            length = len(list(run))
            if value == status:
                found.append(f"M{x} {y}h{length}v1h{-length}z")
            x += length
    return found


def shares(kept: Array, most: int = MOST_CELLS) -> Array:
    """The share of kept pairs in each cell of a picture of at most `most` by `most` cells: float, from 0 to 1."""
    factor = -(-max(kept.shape) // most)
    starts = [np.arange(0, size, factor) for size in kept.shape]
    sums = np.add.reduceat(np.add.reduceat(kept.astype(np.float32), starts[0], axis=0), starts[1], axis=1)
    counts = [np.diff(start, append=size) for start, size in zip(starts, kept.shape, strict=True)]
    found: Array = sums / (counts[0][:, None] * counts[1])
    return found


def pairs_png(kept: Array) -> bytes:
    """The pairs of a call, bool `[queries, keys]`, as PNG: the more pairs of a cell are kept, the less transparent."""
    # Rounded up: a cell with a single kept pair is seen.
    levels = np.ceil(shares(kept) * _SHADES).astype(np.uint8)
    image = Image.fromarray(levels, mode="P")
    color = bytes.fromhex(COLORS[Status.FULL][1:])
    image.putpalette(color * (_SHADES + 1))
    file = io.BytesIO()
    alphas = bytes(255 * level // _SHADES for level in range(_SHADES + 1))
    image.save(file, "PNG", optimize=True, transparency=alphas)
    return file.getvalue()


def data_uri(content: bytes | str) -> str:
    """A PNG or an SVG as a `data:` address, which needs no file."""
    if isinstance(content, str):
        return f"data:image/svg+xml;base64,{base64.b64encode(content.encode()).decode()}"
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
