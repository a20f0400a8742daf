"""Segmented calls: what they give of the tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, Shape, draw

PADDING = -1

BY_ROW = ("band_images", "causal_dropout", "document", "forgetting", "forgetting_pruned")
"""Variants that read something by row, and so refuse positions in any order, or of keys that are not the queries'."""


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def runs(*lengths: tuple[int, int]) -> list[int]:
    """Ids of segments one behind the other: each id, and how many tokens have it."""
    return [number for number, length in lengths for _ in range(length)]


def restarting(ids: Sequence[int], first: int = 0) -> list[int]:
    """Positions that start again with each segment."""
    found: list[int] = []
    for i, number in enumerate(ids):
        found.append(found[-1] + 1 if i and number == ids[i - 1] else first)
    return found


def shuffled(length: int, seed: int) -> list[int]:
    """Positions in any order."""
    order: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


@dataclass(frozen=True, kw_only=True)
class Call:
    """A segmented call of an op, whatever the variant: `tokens` are ids and positions, by batch rows."""

    shape: Shape
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    kv_lengths: tuple[int, ...] = ()
    q_offset: int | str = 0
    reach: int = 0

    def inputs(self, variant: str, dtype: torch.dtype = torch.float16) -> Inputs:
        return draw(variant, self.shape, dtype, positions=self.reach)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {name: ints(rows) for name, rows in self.tokens.items()}
        if self.kv_lengths:
            options["kv_lengths"] = ints(self.kv_lengths)
        return options if "q_positions" in options else {**options, "q_offset": self.q_offset}


def by_token(inputs: Inputs) -> Inputs:
    """The same tensors, stored as `[B, S, H, D]` in memory."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    return replace(inputs, q=q, k=k, v=v, do=do)
