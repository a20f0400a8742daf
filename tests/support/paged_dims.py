"""A variant with a tensor of each kind of dims that calls on paged caches support, and a call of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SPEC = """
variants:
  every_dim:
    mask: (causal and time[b, kv_idx] <= until[b, q_idx]) or allowed[b, q_idx, kv_idx]
    score: score + bias[h, kv_idx] * cap + far[hkv, b]
    tensors:
      time: {dims: [b, kv_idx]}
      until: {dims: [b, q_idx]}
      allowed: {dims: [b, q_idx, kv_idx], dtype: bool}
      bias: {dims: [h, kv_idx]}
      far: {dims: [hkv, b]}
    scalars: {cap: float}
"""


def draw(*, packed: bool, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v of three sequences, and all other arguments; q has its heads before its rows unless it is packed."""
    size, most = 4, 9
    rows = (6,) if packed else (3, 2)
    q = torch.randn(6, 4, 16) if packed else torch.randn(3, 4, 2, 16)
    call: dict[str, Any] = {
        "page_table": torch.tensor([[4, 9, 2], [-1, -1, -1], [0, 7, -1]]),
        "kv_lengths": torch.tensor([most, 0, 5]),
        "time": torch.rand(10, size),
        "until": torch.rand(rows),
        "allowed": torch.rand(*rows, most) > 0.8,
        "bias": torch.randn(4, 10, size),
        "far": torch.randn(2, 3),
        "cap": 0.5,
    }
    if packed:
        call["cu_seqlens_q"] = torch.tensor([0, 1, 3, 6])
    moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in call.items()}
    return [x.to(device) for x in (q, *torch.randn(2, 10, size, 2, 16))], moved
