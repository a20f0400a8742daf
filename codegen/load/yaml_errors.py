"""Messages about a file that is not valid YAML, in terms that the author of a spec knows, and with a remedy."""

from __future__ import annotations

import re

import yaml

_QUOTE = "quote an expression that holds any of , : [ ] { }"


def explain(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """The line (from 1) of an error in `text`, and the message about it."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return 1, f"not valid YAML: {error.problem}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    return mark.line + 1, f"not valid YAML: {_known(error, line, mark.column) or _other(error)}"


def _known(error: yaml.MarkedYAMLError, line: str, column: int) -> str:
    """The message about a common mistake; an empty text for any other."""
    problem = error.problem or ""
    character = re.match(r"found character '(.+)' that cannot start any token", problem)
    operator = next((word for word in ("&&", "||") if re.search(rf"(^|[\s:{{,]){re.escape(word)}", line)), None)
    if character and character[1] == r"\t":
        return "a tab stands before the text; indent with spaces, which is all that YAML takes"
    if operator:
        return f"a value cannot begin with '{operator}', which is no operator here either: write '{WORDS[operator]}'"
    if character:
        return f"a value cannot begin with '{character[1]}'; quote it"
    if problem.startswith("mapping values are not allowed") and error.context is None:
        if re.match(r"\s*(- )?[^\s:#][^:#]*:\s", line[:column]):
            return "a value holds ': ', which begins another entry; put the value into quotes"
        return "an entry is indented further than those before it; give entries of one mapping the same indent"
    return ""


WORDS = {"&&": "and", "||": "or"}
"""Operator of another language -> the word that an expression has in its place."""


def _other(error: yaml.MarkedYAMLError) -> str:
    if error.context is None:
        return str(error.problem)
    hint = ""
    if "flow" in error.context and error.context_mark is not None:
        hint = f"; close what is opened in line {error.context_mark.line + 1}, or {_QUOTE}"
    return f"{error.context}: {error.problem}{hint}"
