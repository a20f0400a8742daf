"""Trains a byte-level transformer, with any causal attention, on the English text of Python's documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

Report = Callable[[int, float], None]
"""Called with a step and its loss."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q `[B, Hq, S, D]` and k, v `[B, Hkv, S, D]`: returns `[B, Hq, S, D]`."""

BYTES = 256
HELD_OUT_WINDOWS = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model and its training run."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    batch: int
    steps: int
    learning_rate: float

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Grouped-query attention: projections around `attend`."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = size.head_dim
        self.heads = (size.heads, size.kv_heads, size.kv_heads)
        self.project_in = nn.Linear(size.width, sum(self.heads) * size.head_dim, bias=False)
        self.project_out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project_in(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        out: Tensor = self.project_out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size, attend)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """Maps bytes `[B, S]` to the logits of each next byte, `[B, S, 256]`."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.position = nn.Parameter(torch.randn(size.seq, size.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.width)
        self.logits = nn.Linear(size.width, BYTES, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(self.blocks(self.embed(text) + self.position)))
        return logits


def load_text() -> tuple[Tensor, Tensor]:
    """The training bytes, and the last tenth of the text, which is held out."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _windows(text: Tensor, starts: Tensor, seq: int, device: str) -> Tensor:
    """`seq + 1` bytes from each start: the inputs, and, shifted by one, the targets."""
    return text[starts[:, None] + torch.arange(seq + 1)].long().to(device)


def _loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, in bfloat16 on a GPU."""
    with torch.autocast(window.device.type, dtype=torch.bfloat16, enabled=window.is_cuda):
        logits = model(window[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """The training loss of each step and the final loss on held-out text, in nats per byte, and the model."""

    losses: list[float]
    held_out: float
    model: nn.Module | None = None

    def with_attention(self, attend: Attend) -> nn.Module:
        """The trained model, changed in place to use another attention."""
        if self.model is None:
            raise ValueError("with_attention: expected a run that kept its model")
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.attend = attend
        return self.model


def held_out_loss(size: Size, model: nn.Module, device: str) -> float:
    """The loss of a trained model on held-out text, in nats per byte."""
    _, text = load_text()
    with torch.no_grad():
        starts = torch.arange(0, len(text) - size.seq, size.seq)[:HELD_OUT_WINDOWS]
        return _loss(model, _windows(text, starts, size.seq, device)).item()


def train(size: Size, attend: Attend, device: str, report: Report, every: int) -> Run:
    """Train with a fixed seed and fixed batches; calls `report` every `every` steps with their mean loss."""
    torch.manual_seed(0)
    model = Transformer(size, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.learning_rate, total_steps=size.steps, pct_start=0.1)
    text, _ = load_text()
    order = torch.Generator().manual_seed(1)
    losses: list[Tensor] = []
    for step in range(1, size.steps + 1):
        starts = torch.randint(len(text) - size.seq, (size.batch,), generator=order)
        loss = _loss(model, _windows(text, starts, size.seq, device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % every == 0:
            report(step, torch.stack(losses[-every:]).mean().item())
    final = held_out_loss(size, model, device)
    return Run(losses=torch.stack(losses).tolist(), held_out=final, model=model)
