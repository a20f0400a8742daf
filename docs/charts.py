"""Draws the pictures of README.md and ARCHITECTURE.md from runs and the generator: `python -m docs.charts`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from docs.generators import ROOT
from docs.generators.architecture_picture import architecture_picture
from docs.generators.benchmarks import chart_rows
from docs.generators.charts import SCHEMES, Row, ratio_chart
from docs.generators.entry_picture import entry_picture
from docs.generators.runs import shown_runs

GPU = "h100"

ASSETS = ROOT / "docs" / "assets"

PANELS = (
    ("cudnn", ("front",), "causal; S128 to S16k"),
    ("fa4", ("front",), "causal, window, softcap"),
    ("flex", ("front",), "every variant"),
    ("fla", ("front",), "with a log-decay"),
)
"""Peer, the suites of its cases, and what these are. Of each suite the latest run with that peer counts."""


def rows() -> list[Row]:
    found = []
    for peer, suites, text in PANELS:
        chosen = []
        for suite in suites:
            with_peer = (each for each in shown_runs(suite) if each.run.gpu == GPU and chart_rows([each], [peer]))
            chosen += [each for each in [next(with_peer, None)] if each is not None]
        found += [
            Row(label=row.label, of=text, which=row.which, ratios=row.ratios) for row in chart_rows(chosen, [peer])
        ]
    return found


def charts() -> dict[Path, str]:
    """File -> SVG of each picture in each scheme."""
    device = next(each.run.device for each in shown_runs("front") if each.run.gpu == GPU)
    found = {}
    for scheme in SCHEMES:
        found[ASSETS / f"figures-{scheme.name}.svg"] = ratio_chart(f"{device}, bfloat16", rows(), scheme)
        found[ASSETS / f"architecture-{scheme.name}.svg"] = architecture_picture(scheme)
        found[ASSETS / f"entry-{scheme.name}.svg"] = entry_picture(scheme)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Write every picture. There are no options: an unknown one is an error."""
    what = "Draw the pictures of README.md and ARCHITECTURE.md."
    argparse.ArgumentParser(prog="python -m docs.charts", description=what).parse_args(argv)
    for path, text in charts().items():
        path.write_text(text, encoding="utf-8")
        print(f"drawn: {path}")


if __name__ == "__main__":
    main()
