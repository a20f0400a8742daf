"""Parameters of the functions in an op's launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A name with its annotation. `is_tensor`: always a tensor, or None, so that autograd can save it."""

    name: str
    annotation: str
    is_tensor: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.annotation}"


def tensor(name: str, *, optional: bool = False) -> Parameter:
    """A parameter for a tensor."""
    return Parameter(name, "Tensor | None" if optional else "Tensor", is_tensor=True)


def names(parameters: Sequence[Parameter]) -> list[str]:
    """The arguments for parameters that the caller knows by the same names."""
    return [parameter.name for parameter in parameters]


def signature(parameters: Sequence[Parameter]) -> str:
    """The source of a function's parameters.

    >>> signature([tensor("q"), Parameter("scale", "float")])
    'q: Tensor, scale: float'
    """
    return ", ".join(map(str, parameters))
