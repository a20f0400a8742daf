"""What a formula is given and gives, the call that shows it, and the table of all formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, KV_HEADS = 2, 4, 2
POSITIONS = 96
"""How many positions the tensors of the calls cover."""

Result = tuple[Tensor | None, Tensor]
"""Which pairs are kept (None: all), and the modified scores."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The pairs of one call: scaled scores `[B, H, Sq, Skv]`, positions i `[Sq, 1]` of queries and j `[Skv]` of keys.

    `b` `[B, 1, 1, 1]` and `h` `[H, 1, 1]` number batch rows and heads.
    """

    s: Tensor
    i: Tensor
    j: Tensor
    own: dict[str, Any]

    @property
    def b(self) -> Tensor:
        return torch.arange(BATCH, device=self.s.device).view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return torch.arange(HEADS, device=self.s.device).view(-1, 1, 1)

    def rows(self, name: str) -> Tensor:
        """An argument `[B]` beside the scores."""
        x: Tensor = self.own[name]
        return x.view(-1, 1, 1, 1)

    def heads(self, name: str) -> Tensor:
        """An argument `[H]` beside the scores."""
        x: Tensor = self.own[name]
        return x.view(-1, 1, 1)

    def of_queries(self, name: str) -> Tensor:
        """An argument `[B, n]` at the queries' positions."""
        x: Tensor = self.own[name]
        return x[:, self.i.flatten()][:, None, :, None]

    def of_keys(self, name: str) -> Tensor:
        """An argument `[B, n]` at the keys' positions."""
        x: Tensor = self.own[name]
        return x[:, self.j][:, None, None, :]

    def each(self, value: Callable[[int, int], int]) -> Tensor:
        """The mask or the integers `[Sq, Skv]` that a function of two positions gives."""
        rows = [[value(i, j) for j in self.j.tolist()] for i in self.i.flatten().tolist()]
        return torch.tensor(rows, device=self.s.device)

    def each_by_row(self, name: str, value: Callable[[list[int], int, int], int]) -> Tensor:
        """The same `[B, 1, Sq, Skv]` for a function that also takes a batch row of an argument."""
        return torch.stack([self.each(partial(value, row)) for row in self.own[name].tolist()])[:, None]


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A variant's mathematics and a call that shows it; `own` draws its arguments.

    `positive` calls have positive q and k: no score is near 0, where rounding moves 1 / score without bound.
    """

    function: Callable[[Grid], Result]
    q_len: int
    kv_len: int
    q_offset: int
    positive: bool
    own: dict[str, Callable[[], Any]] = field(default_factory=dict)


REGISTERED: dict[str, Formula] = {}


def variant(
    q_len: int = 45, kv_len: int = 70, q_offset: int = 0, *, positive: bool = False, **own: Any
) -> Callable[..., Any]:
    """Register a formula; its arguments are numbers or functions that draw them."""
    draws = {name: value if callable(value) else (lambda value=value: value) for name, value in own.items()}

    def register(function: Callable[[Grid], Result]) -> Callable[[Grid], Result]:
        name = function.__name__
        REGISTERED[name] = Formula(
            function=function, q_len=q_len, kv_len=kv_len, q_offset=q_offset, positive=positive, own=draws
        )
        return function

    return register


def capped(s: Tensor, cap: float) -> Tensor:
    """`cap * tanh(s / cap)`, by exponentials."""
    grown = torch.exp(2 * s / cap)
    return cap * (grown - 1) / (grown + 1)
