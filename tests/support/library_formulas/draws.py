"""Arguments that the calls of formulas draw."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.library_formulas.formula import POSITIONS


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def positive(*shape: int) -> Callable[[], Tensor]:
    return lambda: 0.5 + torch.rand(shape)


def ints(*values: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values, dtype=torch.int32)


def chance(probability: float, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) < probability


def documents(*lengths: int) -> Callable[[], Tensor]:
    """`[B, POSITIONS]`: documents of these lengths, in the second row the other way round."""

    def draw() -> Tensor:
        rows = [torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in (lengths, lengths[::-1])]
        return torch.stack(rows)[:, :POSITIONS].int()

    return draw
