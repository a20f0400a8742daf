"""What a variant's own tensors give, by the README alone: its text is evaluated by Python, one sequence after the other.

Nothing here is shared with the generator: no parser, no printer, no reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOKENS = ("q_idx", "kv_idx")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The tokens of one sequence along one axis of a tensor: where they begin, and the index of the first of them."""

    begin: int
    length: int
    first: Any = 0


@dataclass(frozen=True, kw_only=True)
class Own:
    """A tensor as an expression reads it: `tensor[i, j]`, every index moved to the nearest end.

    `rows`: where a dim of tokens lies; `packed` tensors with such a dim have none for the batch row.
    """

    x: Tensor
    dims: Sequence[str | int]
    rows: Mapping[str, Rows]
    packed: bool

    def __getitem__(self, indices: Any) -> Tensor:
        given = indices if isinstance(indices, tuple) else (indices,)
        has_tokens = any(dim in TOKENS for dim in self.dims)
        places: list[Tensor] = []
        for index, dim in zip(given, self.dims, strict=True):
            if dim == "b" and has_tokens and self.packed:
                continue
            index = torch.as_tensor(index).long()
            if dim in self.rows:
                rows = self.rows[str(dim)]
                if rows.length == 0:
                    return self.x.sum() * 0 if self.x.is_floating_point() else torch.zeros((), dtype=self.x.dtype)
                row = index.clamp(min=0) - rows.first if self.packed else index
                places.append(rows.begin + row.clamp(0, rows.length - 1))
            else:
                places.append(index.clamp(0, self.x.shape[len(places)] - 1))
        element = self.x[tuple(places)]
        return element.long() if element.dtype == torch.int32 else element


def _where(condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, torch.as_tensor(a), torch.as_tensor(b))


def evaluated(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of the language."""
    functions = {"where": _where, "max": torch.maximum, "tanh": torch.tanh}
    return eval(text, {"__builtins__": {}}, {**functions, **names})


def attention(
    entry: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: Mapping[str, Any],
    keep: Tensor | bool = True,
) -> tuple[Tensor, Tensor]:
    """o `[H, Sq, D]` and lse of one sequence, q `[H, Sq, D]`, k and v `[H, Skv, D]`."""
    score = q @ k.mT / math.sqrt(q.shape[-1])
    keep = torch.as_tensor(keep) & torch.as_tensor(evaluated(entry.get("mask", "True"), names))
    keep = keep.expand(score.shape)
    score = torch.as_tensor(evaluated(entry.get("score", "score"), {**names, "score": score})).expand(score.shape)
    any_kept = keep.any(-1, keepdim=True)
    # A row without a key has no maximum and no gradient.
    probs = torch.where(keep, score, -math.inf).masked_fill(~any_kept, 0.0).softmax(-1) if score.shape[-1] else score
    lse = torch.where(keep, score, -math.inf).masked_fill(~any_kept, 0.0).logsumexp(-1) if score.shape[-1] else None
    rows = any_kept[..., 0]
    return (
        torch.where(keep, probs, 0.0) @ v,
        torch.full(score.shape[:2], -math.inf, dtype=score.dtype) if lse is None else torch.where(rows, lse, -math.inf),
    )
