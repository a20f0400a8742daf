"""The custom operators that a call runs, and torch's own checks of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OperatorCall = tuple[Any, tuple[Any, ...]]
"""An operator and its arguments."""


class OperatorRecorder(TorchDispatchMode):
    """Records the calls of this package's custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "generated":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def detached(x: Any) -> Any:
    """An argument of an operator whose tensors, in a list too, are leaves without gradient."""
    if isinstance(x, list | tuple):
        return [detached(each) for each in x]
    return x.detach() if isinstance(x, Tensor) else x


def check_operators(calls: Iterable[OperatorCall]) -> None:
    """torch's own checks: schema, no aliasing or mutation, fake against real, dynamic shapes.

    Operators get no tensor that requires grad: the gradients come from the autograd function around them.
    """
    for func, args in calls:
        torch.library.opcheck(func, tuple(map(detached, args)))
