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


def check_operators(calls: Iterable[OperatorCall], *, trained: bool = False) -> None:
    """torch's own checks: schema, no aliasing or mutation, fake against real, dynamic shapes.

    Tensors require grad only if `trained`, and only those of forwards: gradients have none of their own.
    """
    for func, args in calls:
        given = tuple(map(detached, args))
        if trained and func.name().endswith("_fwd"):
            given = tuple([x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given])
        torch.library.opcheck(func, given)
