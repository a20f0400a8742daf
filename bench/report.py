"""Measurements as a table, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bench.measure import Measurement
from bench.peers import OURS, TITLES


def table(measurements: Sequence[Measurement]) -> str:
    """One line per case and pass. A peer's ratio is its time over ours: above 1, ours is faster."""
    cells = {(m.case, m.which, m.implementation): m for m in measurements if m.ms is not None}
    rows = list(dict.fromkeys((m.case, m.which) for m in measurements))
    used = {m.implementation for m in measurements}
    peers = [name for name in TITLES if name in used and name != OURS]
    width = max(len(case) for case, _ in rows)
    lines = [
        f"{'case':{width}} pass |{_heading(TITLES[OURS], '')}" + "".join(_heading(TITLES[p], "ratio") for p in peers)
    ]
    for case, which in rows:
        ours = cells.get((case, which, OURS))
        line = f"{case:{width}} {which:4} |{_cell(ours)}       |"
        lines.append(line + "".join(_peer_cell(cells.get((case, which, peer)), ours) for peer in peers))
    notes = dict.fromkeys(f"  {m.case}: {TITLES[m.implementation]}: {m.note}" for m in measurements if m.note)
    return "\n".join([*lines, *(["\nnot measured, or wrong:", *notes] if notes else [])])


def _heading(title: str, ratio: str) -> str:
    return f" {title + ' ms':>16} {'TF':>5} {ratio:>5} |" if ratio else f" {title + ' ms':>9} {'TF':>5}       |"


def _cell(cell: Measurement | None, width: int = 9) -> str:
    return f" {'-':>{width}} {'-':>5}" if cell is None else f" {cell.ms:{width}.3f} {cell.tflops:5.0f}"


def _peer_cell(cell: Measurement | None, ours: Measurement | None) -> str:
    ratio = f"{cell.ms / ours.ms:.2f}" if cell and ours and cell.ms and ours.ms else "-"
    return f"{_cell(cell, width=16)} {ratio:>5} |"


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """One line per measurement, under the names of its fields."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(m) for m in measurements)


def write_json(path: Path, machine: dict[str, str], measurements: Sequence[Measurement]) -> None:
    """The machine and every measurement."""
    document = {"machine": machine, "measurements": [asdict(m) for m in measurements]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
