"""An extension of griffe, which reads signatures and docstrings for mkdocstrings.

Examples in the text become blocks of code, and parameters get the names that a call gives them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

from docs.generators.signatures import public_names

_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)
"""A paragraph that begins with a prompt: Markdown would read it as a quotation."""


class Docstrings(griffe.Extension):
    """Fences the examples of every docstring, and renames the parameters that `@keywords` renames."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            names = public_names(str(decorator.value) for decorator in obj.decorators)
            for parameter in obj.parameters:
                parameter.name = names.get(parameter.name, parameter.name)


def fenced(docstring: str) -> str:
    """A docstring, without indentation, with its examples as blocks of code."""
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)
