"""An extension of griffe, which reads docstrings for mkdocstrings: examples in the text become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)
"""A paragraph that begins with a prompt: Markdown would read it as a quotation."""


class Doctests(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring, without indentation, with its examples as blocks of code."""
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)
