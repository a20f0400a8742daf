"""What `show --png` draws: the blocks of a call, and the mask itself where it is small enough to be seen."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from codegen.block_status import Status, pairs
from codegen.show import Picture, formula, mask_of

MOST_ELEMENTS = 2048
"""Longest side at which single pairs are drawn."""

_COLORS = {Status.EMPTY: "#f2f2f2", Status.PARTIAL: "#f0b54f", Status.FULL: "#2f6690"}
_CAPTIONS = {Status.EMPTY: "empty: skipped", Status.PARTIAL: "partial: masked", Status.FULL: "full: no mask"}

_INCHES, _DPI = 5.5, 160


def save(p: Picture, path: Path) -> None:
    """Write the picture as PNG, without a display."""
    panels = {f"blocks of {p.grid.block_m} by {p.grid.block_n}, {title}": view for title, view in p.panels.items()}
    call = p.grid.call
    if max(call.q_len, call.kv_len) <= MOST_ELEMENTS:
        panels["query and key pairs"] = pairs(mask_of(p.variant), call) * int(Status.FULL)
    figure = Figure(figsize=(_INCHES * len(panels), _INCHES + 1), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    title = textwrap.fill(f"{p.variant.name}: {formula(p.variant.mask)}", 60 * len(panels))
    figure.suptitle(title, parse_math=False)
    for axes, (name, view) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        # Blocks that stick out of the matrix keep their size; the limits cut them.
        rows, cols = (1, 1) if view.shape == (call.q_len, call.kv_len) else (p.grid.block_m, p.grid.block_n)
        extent = (0, view.shape[1] * cols, view.shape[0] * rows + call.q_offset, call.q_offset)
        axes.imshow(
            view,
            cmap=ListedColormap(list(_COLORS.values())),
            vmin=0,
            vmax=2,
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set(title=name, xlabel="kv_idx", ylabel="q_idx")
        axes.set(xlim=(0, call.kv_len), ylim=(call.q_len + call.q_offset, call.q_offset))
    patches = [Patch(facecolor=_COLORS[status], edgecolor="#888888", label=_CAPTIONS[status]) for status in Status]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, format="png")
