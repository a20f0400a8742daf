"""Results as text tables. With many peers they are a little wider than `COLUMNS`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from bench.record import OURS, TITLES, Measurement, Results
from bench.report.targets import bars_table, below, causal_beside

COLUMNS = 120
UNSTEADY = 0.05
"""The spread of rounds above which the report warns."""

STYLES = {r"\d+\.\d+<": "red", r"\bMISSED\b": "bold red", r"\bmet\b": "green", r"\bWRONG\b": "bold red"}
"""Styles of a terminal, by regular expression."""

PASS_TITLES = {"fwd": "forward", "bwd": "backward"}


def report(results: Results) -> str:
    """The whole report: a table per suite and pass, shares, costs, notes, and the project's targets."""
    parts = []
    for suite, cases in results.panels().items():
        parts += [speed_table(results, suite, cases, which) for which in PASS_TITLES]
    parts += [shares_table(results), blocks_table(results), costs_table(results), notes(results), bars_table(results)]
    return "\n\n".join(part for part in parts if part)


def speed_table(results: Results, suite: str, cases: Sequence[str], which: str) -> str:
    """One line per case: ours, then the rate of each peer and its time divided by ours; "<" where ours is slower."""
    timed = results.timed()
    chosen = set(cases)
    peers = _used(m.implementation for m in results.measurements if m.case in chosen)[1:]
    width = max(len(case) for case in cases)
    heads = "".join(f"|{TITLES[peer]:>10} " for peer in peers)
    title = (
        f"{suite}, {PASS_TITLES[which]}: TFLOP/s of unmasked scores, and the peer's time over ours (<: ours is slower)"
    )
    lines = [title, f"{'case':{width}} |  ours ms   TF {heads}"]
    for case in cases:
        ours = timed.get((case, which, OURS))
        own = f" {'-':>8} {'-':>4} " if ours is None else f" {ours.ms:8.3f} {ours.tflops:4.0f} "
        lines.append(f"{case:{width}} |{own}{''.join(_cell(timed.get((case, which, peer)), ours) for peer in peers)}")
    return "\n".join(lines)


def _used(names: Iterable[str]) -> list[str]:
    """Ours first, then the peers among `names`."""
    found = {*names, OURS}
    return [name for name in TITLES if name in found]


def _cell(cell: Measurement | None, ours: Measurement | None) -> str:
    if cell is None or not cell.ms:
        return f"|{'-':>4}{'-':>6} "
    ratio = cell.ms / ours.ms if ours and ours.ms else None
    text = f"{'-':>6} " if ratio is None else f"{ratio:6.{2 if ratio < 100 else 0}f}{'<' if ratio < 1 else ' '}"
    return f"|{cell.tflops:4.0f}{text}"


def shares_table(results: Results) -> str:
    """Our rates as shares of causal's rate at the same shape, and of the rate at the next smaller power-of-two D."""
    causal = "ours, forward | backward: TFLOP/s and share of causal's of the same shape, per unmasked score"
    power = "ours, forward | backward: TFLOP/s and share of the power of two below, per useful FLOP"
    tables = (_shares(results, causal_beside, causal), _shares(results, below, power))
    return "\n\n".join("\n".join(lines) for lines in tables if lines)


def _shares(results: Results, beside: Callable[[str], str | None], title: str) -> list[str]:
    timed = results.timed()
    found = []
    for case in results.cases():
        other = beside(case)
        cells = []
        for which in PASS_TITLES:
            mine, theirs = timed.get((case, which, OURS)), timed.get((other or "", which, OURS))
            if mine and theirs and mine.tflops and theirs.tflops:
                cells.append(f"{mine.tflops:5.0f} {mine.tflops / theirs.tflops:5.0%}")
        if len(cells) == len(PASS_TITLES):
            found.append(f"  {case:40} | {' | '.join(cells)}")
    return [title, *found] if found else []


def blocks_table(results: Results) -> str:
    """Our rates as shares of causal's at the same shape, counting all scores of blocks that have an unmasked one."""
    title = "ours, forward | backward: TFLOP/s and share of causal's of the same shape, per score in computed blocks"
    found = []
    for case, shares in computed_shares(results).items():
        cells = [f"{tflops:5.0f} {share:5.0%}" for tflops, share in shares.values()]
        found.append(f"  {case:40} | {' | '.join(cells)}")
    return "\n".join([title, *found]) if found else ""


def computed_shares(results: Results) -> dict[str, dict[str, tuple[float, float]]]:
    """Case -> pass -> our TFLOP/s of all scores in computed blocks, and that over causal's of the same shape.

    A block with one unmasked score is computed whole, so this rate counts all scores that a kernel has to compute.
    """
    kept, timed = results.settings.get("block_shares", {}), results.timed()
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for case in kept:
        beside = causal_beside(case) or ""
        rates = {}
        for which in PASS_TITLES:
            mine, theirs = timed.get((case, which, OURS)), timed.get((beside, which, OURS))
            if beside in kept and mine and theirs and mine.tflops and theirs.tflops:
                rate = mine.tflops / kept[case]
                rates[which] = (rate, rate / (theirs.tflops / kept[beside]))
        if len(rates) == len(PASS_TITLES):
            found[case] = rates
    return found


def costs_table(results: Results) -> str:
    """Memory, preparation and first calls: one line per case, one column per implementation."""
    how = f", {results.settings['first_call']}" if "first_call" in results.settings else ""
    kinds: dict[str, tuple[str, int]] = {
        "peak_mib": ("peak memory of forward and backward beyond the inputs, MiB", 0),
        "setup_ms": ("making the schedule or block mask, ms, before the clock starts", 3),
        "first_s": (f"first output and gradients in this process, s{how}", 2),
    }
    names = _used(cost.implementation for cost in results.costs)
    parts = []
    for kind, (title, digits) in kinds.items():
        found = {
            (cost.case, cost.implementation): value
            for cost in results.costs
            if (value := getattr(cost, kind)) is not None
        }
        cases = list(dict.fromkeys(case for case, _ in found))
        if not cases:
            continue
        shown = [name for name in names if any((case, name) in found for case in cases)]
        width = max(map(len, cases))
        lines = [title, f"{'case':{width}} |" + "".join(f" {TITLES[name]:>9}" for name in shown)]
        for case in cases:
            cells = (found.get((case, name)) for name in shown)
            texts = "".join(f" {'-':>9}" if value is None else f" {value:9.{digits}f}" for value in cells)
            lines.append(f"{case:{width}} |{texts}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def notes(results: Results) -> str:
    """Errors and missing peers, each reason once with its cases."""
    cases: dict[str, list[str]] = {}
    for m in results.measurements:
        reason = f"{TITLES.get(m.implementation, m.implementation)}: {m.note}"
        if m.note and m.case not in cases.setdefault(reason, []):
            cases[reason].append(m.case)
    lines = [f"{TITLES.get(peer, peer)} is not installed: pip install {name}" for peer, name in results.missing.items()]
    lines += [
        f"{reason} [{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}]" for reason, names in cases.items()
    ]
    worst = max(results.measurements, key=lambda m: m.spread or 0.0, default=None)
    if worst and (worst.spread or 0.0) > UNSTEADY:
        where = f"{TITLES.get(worst.implementation, worst.implementation)}, {worst.case}, {PASS_TITLES[worst.which]}"
        lines.append(f"unsteady: the medians of rounds lie up to {worst.spread:.0%} apart ({where})")
    if results.skipped:
        lines.append(f"no time for {len(results.skipped)} cases: {', '.join(results.skipped)}")
    wrapped = (textwrap.fill(line, COLUMNS, initial_indent="  ", subsequent_indent="    ") for line in lines)
    return "\n".join(["not measured, or wrong:", *wrapped] if lines else [])
