"""Plots of a run: the ratio to each peer, and rates by sequence length. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.cases.suites import HIDDEN, TOKENS
from bench.record import OURS, PASSES, TITLES, Results, parse_name

# Okabe and Ito's palette, which colour-blind readers can distinguish, and markers for print in grey.
STYLES = {
    OURS: ("#000000", "o"),
    "flex": ("#E69F00", "s"),
    "flex-max": ("#D55E00", "D"),
    "fa2": ("#56B4E9", "^"),
    "cudnn": ("#009E73", "v"),
    "efficient": ("#999999", "P"),
    "fa4": ("#0072B2", "X"),
    "fla": ("#CC79A7", "*"),
}
PASS_TITLES = {"fwd": "forward", "bwd": "backward"}
_LOSS = "#FBE3D6"
"""The background where ours is slower."""

_DPI = 150
_LEAST_SPAN = (0.8, 1.5)
"""The smallest range of ratios on an axis."""


def save_all(results: Results, folder: Path) -> list[Path]:
    """Write every plot that the run has data for; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {f"ratios_{suite}": _ratios(results, suite, cases) for suite, cases in results.panels().items()}
    pictures["rates"] = _rates(results)
    paths = []
    for name, figure in pictures.items():
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], format="png", dpi=_DPI)
    return paths


def _figure(width: float, height: float, title: str, results: Results) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n{results.machine.get('gpu', '')}, bfloat16", fontsize=11)
    return figure


def _ratios(results: Results, suite: str, cases: Sequence[str]) -> Figure | None:
    """The peers' times divided by ours: one line per case, one dot per peer, one panel per pass."""
    timed = results.timed()
    ratios = {
        (case, which, peer): theirs.ms / ours.ms
        for (case, which, peer), theirs in timed.items()
        if case in set(cases)
        and peer != OURS
        and theirs.ms
        and (ours := timed.get((case, which, OURS))) is not None
        and ours.ms
    }
    shown = [case for case in cases if any(case == key[0] for key in ratios)]
    if not shown:
        return None
    title = f"{suite}: the peer's time over ours; left of 1, shaded, ours is slower"
    figure = _figure(13, 1.8 + 0.28 * len(shown), title, results)
    panels = figure.subplots(1, len(PASSES), sharey=True, squeeze=False)[0]
    span = (min(_LEAST_SPAN[0], *ratios.values()) / 1.1, max(_LEAST_SPAN[1], *ratios.values()) * 1.1)
    for axes, which in zip(panels, PASSES, strict=True):
        _ratio_panel(axes, {(c, peer): x for (c, at, peer), x in ratios.items() if at == which}, shown, span)
        axes.set_title(PASS_TITLES[which])
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _ratio_panel(axes: Any, ratios: dict[tuple[str, str], float], shown: list[str], span: tuple[float, float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set(xlim=span, ylim=(len(shown) - 0.5, -0.5))
    axes.axvspan(span[0], 1, color=_LOSS, zorder=0)
    axes.axvline(1, color="black", linewidth=1, zorder=1)
    axes.set_yticks(range(len(shown)), shown, fontsize=7)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if span[1] / span[0] < 4:
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.25, 1.5, 1.75)))
    axes.grid(axis="both", linewidth=0.3)
    for peer, (color, marker) in STYLES.items():
        points = [(x, shown.index(case)) for (case, by), x in ratios.items() if by == peer]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, s=32, color=color, marker=marker, label=TITLES[peer], zorder=3)
    for (case, _), x in ratios.items():
        if x < 1:
            at = (x, shown.index(case))
            axes.annotate(f"{x:.2f}", at, xytext=(0, 5), textcoords="offset points", fontsize=6, ha="center")


def _rates(results: Results) -> Figure | None:
    """TFLOP/s by sequence length in FlashAttention-3's benchmark: a row per mask and pass, a column per head_dim."""
    rates: dict[tuple[str, str, int], dict[str, list[tuple[int, float]]]] = {}
    for m in results.measurements:
        name = parse_name(m.case)
        protocol = name.heads * name.dim == HIDDEN and name.batch * name.seq == TOKENS
        if m.tflops and protocol and name.kv_heads == name.heads and name.variant in ("causal", "full"):
            panel = rates.setdefault((name.variant, m.which, name.dim), {})
            panel.setdefault(m.implementation, []).append((name.seq, m.tflops))
    if not any(len(points) > 1 for panel in rates.values() for points in panel.values()):
        return None
    rows = sorted({(variant, which) for variant, which, _ in rates}, key=lambda row: (row[0], PASSES.index(row[1])))
    dims = sorted({dim for _, _, dim in rates})
    title = f"TFLOP/s of unmasked scores, {TOKENS} tokens, hidden size {HIDDEN}"
    figure = _figure(1 + 4 * len(dims), 1 + 2.8 * len(rows), title, results)
    panels = figure.subplots(len(rows), len(dims), squeeze=False, sharex=True)
    for row, (variant, which) in zip(panels, rows, strict=True):
        for axes, dim in zip(row, dims, strict=True):
            axes.set_title(f"{variant} {PASS_TITLES[which]} D{dim}", fontsize=9)
            for by, (color, marker) in STYLES.items():
                points = sorted(rates.get((variant, which, dim), {}).get(by, []))
                if points:
                    axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=5, label=TITLES[by])
            seqs = sorted({seq for panel in rates.values() for points in panel.values() for seq, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(seqs, [f"{seq // 1024}k" if seq >= 1024 else f"{seq}" for seq in seqs], fontsize=7)
            axes.set_ylim(bottom=0)
            axes.grid(linewidth=0.3)
    flat = [axes for row in panels for axes in row]
    handles = {label: h for axes in flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure
