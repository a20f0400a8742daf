"""Draws the picture of `show --png`: the blocks of a call, and the mask itself if it is small enough to be seen."""

from __future__ import annotations

import textwrap
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from codegen.inspect.block_status import Status, block_diagonal, pairs
from codegen.inspect.show import Picture, formula, mask_of
from codegen.ir.evaluate import Array

MOST_ELEMENTS = 2048
"""Longest side at which single pairs are drawn."""

_COLORS = {Status.EMPTY: "#f2f2f2", Status.PARTIAL: "#f0b54f", Status.FULL: "#2f6690"}
_CAPTIONS = {Status.EMPTY: "empty: skipped", Status.PARTIAL: "partial: masked", Status.FULL: "full: no mask"}
_BOUNDARY = "#c0392b"
"""Colour of the line between two sequences of a packed call."""

_INCHES, _DPI = 5.5, 160


def save(p: Picture, path: Path) -> None:
    """Write the picture as PNG, without a display."""
    calls, block_m, block_n = [grid.call for grid in p.grids], p.grids[0].block_m, p.grids[0].block_n
    row_starts = list(accumulate((call.q_len for call in calls), initial=0))
    key_starts = list(accumulate((call.kv_len for call in calls), initial=0))
    # The axes show positions only if the picture has a single sequence.
    names, shift = (("key", "query"), 0) if p.segments else (("kv_idx", "q_idx"), calls[0].q_offset)
    blocks = (
        _edges([grid.q_starts for grid in p.grids], row_starts),
        _edges([grid.kv_starts for grid in p.grids], key_starts),
    )
    panels = {f"blocks of {block_m} by {block_n}, {title}": (*blocks, view) for title, view in p.panels.items()}
    if max(p.q_len, p.kv_len) <= MOST_ELEMENTS:
        kept = block_diagonal([pairs(mask_of(p.variant), call) for call in calls]) * int(Status.FULL)
        panels["query and key pairs"] = (np.arange(p.q_len + 1), np.arange(p.kv_len + 1), kept)
    figure = Figure(figsize=(_INCHES * len(panels), _INCHES + 1), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    title = textwrap.fill(f"{p.variant.name}: {formula(p.variant.mask)}", 60 * len(panels))
    figure.suptitle(title, parse_math=False)
    subplots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, (rows, keys, view)) in zip(subplots, panels.items(), strict=True):
        colors = ListedColormap(list(_COLORS.values()))
        axes.pcolorfast(keys, rows + shift, view, cmap=colors, vmin=0, vmax=2)
        for row, key in zip(row_starts[1:-1], key_starts[1:-1], strict=True):
            axes.axhline(row, color=_BOUNDARY, linewidth=0.8)
            axes.axvline(key, color=_BOUNDARY, linewidth=0.8)
        axes.set(title=name, xlabel=names[0], ylabel=names[1])
        axes.set(xlim=(0, p.kv_len), ylim=(p.q_len + shift, shift))
    patches = [Patch(facecolor=_COLORS[status], edgecolor="#888888", label=_CAPTIONS[status]) for status in Status]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, format="png")


def _edges(starts: list[Array], sequence_starts: list[int]) -> Array:
    """Edges of the blocks along one axis of the picture, from their starts within each sequence."""
    edges = [own + first for own, first in zip(starts, sequence_starts, strict=False)]
    return np.concatenate([*edges, sequence_starts[-1:]])
