"""The transformer of `examples.train` in Flax, trained with any Flax `attention_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from jax import Array
from torch import Tensor

from examples.train import BYTES, HELD_OUT_WINDOWS, Report, Run, Size, load_text

Attend = Callable[..., Array]
"""`attention_fn` of `flax.nnx.MultiHeadAttention`, called with `is_causal=True`."""


class Block(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, size: Size, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            size.heads,
            size.width,
            num_kv_heads=size.kv_heads,
            use_bias=False,
            attention_fn=attend,
            decode=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.mlp_in = nnx.Linear(size.width, 4 * size.width, dtype=dtype, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * size.width, size.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        out: Array = x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class Transformer(nnx.Module):
    """Maps bytes `[B, S]` to the logits of each next byte, `[B, S, 256]`."""

    def __init__(self, size: Size, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(BYTES, size.width, embedding_init=small, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(small(rngs.params(), (size.seq, size.width)))
        self.blocks = nnx.List([Block(size, attend, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(size.width, BYTES, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, text: Array) -> Array:
        x = self.embed(text) + self.position[None].astype(self.embed.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Array = self.logits(self.norm(x))
        return logits


def _loss(model: Transformer, window: Array) -> Array:
    """Mean cross-entropy in nats per byte."""
    logits = model(window[:, :-1]).astype(jnp.float32)
    losses: Array = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    return losses.mean()


@nnx.jit
def _step(model: Transformer, optimizer: nnx.Optimizer[Transformer], window: Array) -> Array:
    """The loss before one step of the optimizer."""
    loss: Array
    loss, gradients = nnx.value_and_grad(_loss)(model, window)
    optimizer.update(model, gradients)
    return loss


def _optimizer(size: Size) -> optax.GradientTransformation:
    rate = optax.cosine_onecycle_schedule(size.steps, size.learning_rate, pct_start=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1))


def _batches(size: Size, text: Tensor) -> Iterator[Array]:
    """The batches of `examples.train`, `[B, S + 1]`: the inputs, and, shifted by one, the targets."""
    order = torch.Generator().manual_seed(1)
    for _ in range(size.steps):
        starts = torch.randint(len(text) - size.seq, (size.batch,), generator=order)
        yield _windows(text, starts, size.seq)


def _windows(text: Tensor, starts: Tensor, seq: int) -> Array:
    return jnp.asarray(text[starts[:, None] + torch.arange(seq + 1)].numpy().astype(np.int32))


def train(size: Size, attend: Attend, report: Report, every: int) -> Run:
    """Train with a fixed seed and fixed batches; calls `report` every `every` steps with their mean loss.

    On a GPU it computes in bfloat16, with parameters in float32.
    """
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = Transformer(size, attend, dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, _optimizer(size), wrt=nnx.Param)
    text, held_out = load_text()
    losses: list[Array] = []
    for step, window in enumerate(_batches(size, text), start=1):
        losses.append(_step(model, optimizer, window))
        if step % every == 0:
            report(step, float(jnp.stack(losses[-every:]).mean()))
    starts = torch.arange(0, len(held_out) - size.seq, size.seq)[:HELD_OUT_WINDOWS]
    final = nnx.jit(_loss)(model, _windows(held_out, starts, size.seq))
    return Run(losses=jnp.stack(losses).tolist(), held_out=float(final))
