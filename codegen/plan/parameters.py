"""Parameters of the functions in an op's launches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def partial_signature(parameters: Sequence[Parameter], used: Collection[str]) -> str:
    """The same of a function that reads some of them: unused ones get an underscore, those at the end no name.

    >>> partial_signature([tensor("q"), tensor("k"), Parameter("scale", "float")], {"k"})
    '_q: Tensor, k: Tensor, *_: object'
    """
    last = max(i for i, p in enumerate(parameters) if p.name in used)
    named = [str(p) if p.name in used else f"_{p}" for p in parameters[: last + 1]]
    return ", ".join([*named, "*_: object"])
