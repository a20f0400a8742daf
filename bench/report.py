"""Measurements as a table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bench.measure import Measurement
from bench.peers import OURS, TITLES


def table(measurements: Sequence[Measurement]) -> str:
    """One line per case and pass. A peer's ratio is its time over ours: above 1, ours is faster."""
    timed = {(m.case, m.which, m.implementation): m for m in measurements if m.ms}
    rows = list(dict.fromkeys((m.case, m.which) for m in measurements))
    used = {m.implementation for m in measurements}
    peers = [name for name in TITLES if name in used and name != OURS]
    width = max(len(case) for case, _ in rows)
    headings = "".join(f" {TITLES[name] + ' ms':>8} {'TF':>4} {'ratio':>5} |" for name in peers)
    lines = [f"{'case':{width}} pass | {'ours ms':>8} {'TF':>4} |{headings}"]
    for case, which in rows:
        ours = timed.get((case, which, OURS))
        cells = "".join(_peer_cell(timed.get((case, which, peer)), ours) for peer in peers)
        lines.append(f"{case:{width}} {which:4} |{_cell(ours)} |{cells}")
    return "\n".join([*lines, *_notes(measurements)])


def _cell(cell: Measurement | None) -> str:
    return f" {'-':>8} {'-':>4}" if cell is None else f" {cell.ms:8.3f} {cell.tflops:4.0f}"


def _peer_cell(cell: Measurement | None, ours: Measurement | None) -> str:
    ratio = f"{cell.ms / ours.ms:.2f}" if cell and ours and cell.ms and ours.ms else "-"
    return f"{_cell(cell)} {ratio:>5} |"


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    """What was wrong or missing, each reason once with the cases it concerns."""
    cases: dict[str, list[str]] = {}
    for m in measurements:
        if m.note and m.case not in cases.setdefault(f"{TITLES[m.implementation]}: {m.note}", []):
            cases[f"{TITLES[m.implementation]}: {m.note}"].append(m.case)
    lines = [
        f"  {reason} [{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}]" for reason, names in cases.items()
    ]
    return ["", "not measured, or wrong:", *lines] if lines else []


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """One line per measurement, under the names of its fields."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(m) for m in measurements)
