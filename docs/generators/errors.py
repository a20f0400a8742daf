"""`reference/errors.md`: errors of specs, from the tests' expected messages; of calls and commands, from the source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docs.generators import ROOT
from docs.generators.markdown import code, fence, page, table
from docs.generators.messages import command_errors, expected_arguments

BAD = ROOT / "tests" / "specs" / "bad"

INTRODUCTION = """A bad spec reports all of its problems at once: file, line, the entry, the rule that it breaks, and
after the semicolon the remedy. Each example below is [a test](../../tests/specs/bad): the message is what the
generator prints."""

CALLS = """An `ArgumentError`, both a `TypeError` and a `ValueError`, is raised before any launch. It names the op, the
argument, what was expected and what was got: `alibi: slope: expected shape [8], got [4]`. In this list `…` stands for
what a call fills in."""

COMMANDS = "Besides the errors of a spec, `codegen` prints these, with exit code 2. `…` stands for what is filled in."

_MESSAGE = re.compile(
    r"^\S+\.yaml:(?P<line>\d+): (?:(?P<where>[^\s:]+(?:\([^)]*\))?): )?(?P<text>.*?)(?: \(column \d+\))?$"
)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One message: the line of the spec, the rule, and the remedy, which is empty if the rule contains it."""

    line: int
    where: str
    rule: str
    remedy: str


def parse_message(text: str) -> Reported:
    """The parts of a message, which is a line of a golden file.

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
    calls = [[code(argument), "; ".join(map(_shown, expected))] for argument, expected in expected_arguments().items()]
    commands = [[room, _shown(message)] for room, message in command_errors()]
    return {
        "reference/errors.md": page(
            "Errors",
            "Errors [of a spec](#in-a-spec), [of a call](#in-a-call) and [of a command](#in-a-command).",
            "## In a spec",
            INTRODUCTION,
            *sections,
            "## In a call",
            CALLS,
            table(["argument", "expected"], calls),
            "## In a command",
            COMMANDS,
            table(["of", "message"], commands),
        )
    }


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
        f"### {title}\n\n"
        + table(["line", "cause", "message", "remedy"], [_escaped(row) for row in rows])
        + f"\n\n{listing}"
    )


def _escaped(row: list[str]) -> list[str]:
    """Escape the characters of messages that have a meaning in Markdown, so that they are shown literally."""
    line, cause, rule, remedy = row
    return [line, cause, _shown(rule), _shown(remedy)]


def _shown(text: str) -> str:
    return re.sub(r"([*_<>\[\]`$~\\])", r"\\\1", text)
