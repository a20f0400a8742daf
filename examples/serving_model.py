"""The decoder that `examples/serve.py` serves: Llama's layers with random weights, and any of the causal variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import generated.torch as ops

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A layer's number, q `[T, Hq, D]`, k and v `[T, Hkv, D]` of the step's tokens -> o `[T, Hq, D]`."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model's sizes; `longest` is the most tokens of a sequence."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    inner: int
    vocabulary: int
    longest: int


def _slopes(size: Size) -> Tensor:
    """Slopes in a geometric sequence, as in ALiBi, each changed a little at random as training would."""
    exponents = torch.arange(1, size.heads + 1) * (8 / size.heads)
    return torch.exp2(-exponents) * (1 + 0.1 * torch.randn(size.heads))


OWN: dict[str, Callable[[Size], dict[str, Any]]] = {
    "alibi": lambda size: {"slope": _slopes(size)},
    "causal": lambda _: {},
    "gemma2_local": lambda _: {},
    "gpt_oss": lambda size: {"sink": torch.randn(size.heads)},
    "relative_bias": lambda size: {"bias": 0.1 * torch.randn(size.heads, 128)},
    "softcap": lambda _: {},
    "streaming_llm": lambda size: {"size": size.longest // 4, "sinks": 4},
    "window": lambda size: {"size": size.longest // 4},
}
"""The variants that can be served, and the arguments of each beside q, k and v, drawn anew for each layer."""

WITHOUT_ROTATION = ("alibi", "relative_bias")
"""Variants whose scores depend on the distance of query and key, so that q and k need no rotary embedding."""


class Layer(nn.Module):
    """One pre-norm layer: grouped-query attention and a gated feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = (size.heads, size.kv_heads, size.kv_heads)
        self.head_dim = size.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.project_in = nn.Linear(size.width, sum(self.heads) * size.head_dim, bias=False)
        self.project_out = nn.Linear(size.heads * size.head_dim, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        heads: Tensor = self.project_in(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        found: tuple[Tensor, ...] = heads.split(self.heads, dim=1)
        return found

    def rest(self, x: Tensor, o: Tensor) -> Tensor:
        x = x + self.project_out(o.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


class Model(nn.Module):
    """Tokens `[T]` of any sequences and their positions to the last hidden state `[T, width]`."""

    rotation: Tensor

    def __init__(self, size: Size, variant: str) -> None:
        super().__init__()
        self.size, self.variant = size, variant
        self.op: Any = getattr(ops, variant)
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.own = [OWN[variant](size) for _ in range(size.layers)]
        angles = torch.arange(size.longest, dtype=torch.float32)[:, None] * torch.exp2(
            torch.arange(0, size.head_dim, 2, dtype=torch.float32) * (-13 / size.head_dim)
        )
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]).to(self.head.weight), False)
        self.requires_grad_(False).eval()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = self.rotation[:, positions, None]
        x = self.embed(tokens)
        for number, module in enumerate(self.layers):
            layer: Any = module
            q, k, v = layer.qkv(x)
            if self.variant not in WITHOUT_ROTATION:
                q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            x = layer.rest(x, attend(number, q, k, v))
        out: Tensor = self.norm(x)
        return out

    def alone(self, tokens: Tensor) -> Tensor:
        """The logits of every next token of one sequence, `[T, vocabulary]`, without a cache."""

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o: Tensor = self.op(q[None], k[None], v[None], layout="bshd", **self.own[number])
            return o[0]

        positions = torch.arange(len(tokens), device=tokens.device)
        logits: Tensor = self.head(self(tokens, positions, attend))
        return logits


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
