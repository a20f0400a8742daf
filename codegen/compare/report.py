"""The results of `compare` as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codegen.compare.calls import mode_of, text_of, variant_of
from codegen.compare.proof import Result, Status
from codegen.compare.rekey import Rekeyed
from codegen.util.text import aligned

MOST_SHOWN = 30
"""Launches that are not equal are shown one by one up to this many."""


def table(results: Sequence[Result]) -> list[str]:
    """A row for each variant and mode: how many launches there are of each status."""
    counts: dict[tuple[str, str], dict[Status, int]] = {}
    for result in results:
        row = counts.setdefault((variant_of(result.call), mode_of(result.call)), dict.fromkeys(Status, 0))
        row[result.status] += 1
    rows = [(*key, *(str(count or "-") for count in row.values())) for key, row in counts.items()]
    total = [sum(row[status] for row in counts.values()) for status in Status]
    header = ("variant", "mode", *(status.value for status in Status))
    return aligned([header, *rows, ("all", "", *map(str, total))])


def problems(results: Iterable[Result]) -> list[str]:
    """Every launch that is not proven equal: its kernel and call, with the first lines that differ."""
    unequal = [result for result in results if not result.status.is_equal]
    lines: list[str] = []
    for result in unequal[:MOST_SHOWN]:
        lines.append(f"{_status_text(result)}: {result.name}, {mode_of(result.call)}, {text_of(result.call)}")
        lines += [f"    {line}" for line in result.detail]
    if len(unequal) > MOST_SHOWN:
        lines.append(f"and {len(unequal) - MOST_SHOWN} more")
    return lines


def rekeyed(found: Sequence[Rekeyed]) -> list[str]:
    """For each tuned file: the number of rows that were rewritten, and the parts that were left, with the reason."""
    lines: list[str] = []
    for path in dict.fromkeys(each.part.path for each in found):
        own = [each for each in found if each.part.path == path]
        written = [each for each in own if not each.fault]
        rows = sum(len(each.part.rows) for each in written)
        lines.append(
            f"{path.parent.name}/{path.name}: {rows} of {sum(len(x.part.rows) for x in own)} stale rows re-keyed"
        )
        lines += [f"    left: {each.part.title}: {each.fault}" for each in own if each.fault]
    return lines


def _status_text(result: Result) -> str:
    if result.status is not Status.MISSING:
        return str(result.status.value)
    return f"missing in {'OLD' if result.old is None else 'NEW'}"
