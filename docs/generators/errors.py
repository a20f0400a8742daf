"""`reference/errors.md`: every kind of error in a spec, from the specs and messages that the tests pin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docs.generators import ROOT
from docs.generators.markdown import code, fence, page, table

BAD = ROOT / "tests" / "specs" / "bad"

INTRODUCTION = """A bad spec reports all of its problems at once: file, line, the entry, the rule that it breaks, and
after the semicolon the remedy. Each example below is [a test](../../tests/specs/bad): the message is what the
generator prints.

Errors in a call are an `ArgumentError`, both a `TypeError` and a `ValueError`: `op: argument: expected ..., got ...`.
They are raised before any launch. What each argument expects is in the pages of the ops, [torch](torch/index.md) and
[JAX](jax/index.md)."""

_MESSAGE = re.compile(
    r"^\S+\.yaml:(?P<line>\d+): (?:(?P<where>[^\s:]+(?:\([^)]*\))?): )?(?P<text>.*?)(?: \(column \d+\))?$"
)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One message: the line of the spec, the rule, and the remedy, empty where the rule says it."""

    line: int
    where: str
    rule: str
    remedy: str


def parse_message(text: str) -> Reported:
    """A line of a golden.

    >>> parse_message("a.yaml:3: masks.near: unknown name 'scor'; did you mean 'score'? (column 4)").remedy
    "did you mean 'score'?"
    """
    match = _MESSAGE.match(text)
    if match is None:
        raise ValueError(f"not a message about a spec: {text!r}")
    rule, _, remedy = match["text"].partition("; ")
    return Reported(line=int(match["line"]), where=match["where"] or "", rule=rule, remedy=remedy)


def pages() -> dict[str, str | bytes]:
    sections = [_section(path) for path in sorted(BAD.glob("*.txt"))]
    return {"reference/errors.md": page("Errors", INTRODUCTION, *sections)}


def _section(path: Path) -> str:
    title = path.stem.replace("_", " ").capitalize()
    spec = path.with_suffix(".yaml").read_bytes().decode("utf-8", errors="replace")
    lines = spec.splitlines()
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        reported = parse_message(text)
        cause = lines[reported.line - 1].strip() if 0 < reported.line <= len(lines) else ""
        rows.append(
            [str(reported.line), code(cause.replace("\t", " ")) if cause else "", reported.rule, reported.remedy]
        )
    listing = f'??? example "{path.stem}.yaml"\n\n' + "\n".join(
        f"    {line}".rstrip() for line in fence(spec or "# (an empty file)", "yaml").splitlines()
    )
    return (
        f"## {title}\n\n"
        + table(["line", "cause", "message", "remedy"], [_escaped(row) for row in rows])
        + f"\n\n{listing}"
    )


def _escaped(row: list[str]) -> list[str]:
    """Messages hold characters that Markdown reads: they are shown as they are."""
    line, cause, rule, remedy = row
    return [line, cause, *(re.sub(r"([*_<>\[\]`$~\\])", r"\\\1", text) for text in (rule, remedy))]
