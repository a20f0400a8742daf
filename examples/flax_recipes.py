"""Documents and Gemma-like layers in Flax, linen and nnx: `python -m examples.flax_recipes`.

Layers that see a window alternate with layers that see the whole document, all with capped scores, as in Gemma 2. Rows
hold several documents, and no token attends to another one. In both APIs a model is trained twice with the same start
and the same batches: with the ops, and with Flax's own attention and an explicit mask. The losses have to agree.

The ids of documents come with each batch. There are two ways to pass them to a module of Flax:

1. linen makes its layers while it is traced, so `attention_fn` is bound to the ids of the batch there.
2. nnx makes its layers once. Its attention passes `mask` on unchanged, so `mask` carries the ids to `by_documents`.

`--full` uses sizes for a GPU. The exit status is 1 if losses differ, or if the loss of a model does not fall.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import Array

from generated import jax as ops
from generated.jax_nn import attention_fn
from generated.packing import pack_rows

VOCABULARY = 32
CAP = 20.0
BOUND = {"cpu": 1e-4, "gpu": 3e-2}
"""Largest relative difference of two losses. CPU: float32 sums in another order, added up over steps. GPU: bfloat16."""

Attend = Callable[..., Array]
"""`attention_fn` of a layer of Flax."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of model and batches. `windows`: how many tokens a query sees in each layer; None: the whole document."""

    width: int
    heads: int
    kv_heads: int
    windows: tuple[int | None, ...]
    seq: int
    batch: int
    steps: int
    dtype: Any

    def reach(self, layer: int) -> int:
        """How many positions before its own a query of a layer sees."""
        window = self.windows[layer]
        return self.seq if window is None else window - 1


SMALL = Size(width=64, heads=4, kv_heads=2, windows=(8, None), seq=64, batch=8, steps=12, dtype=jnp.float32)
FULL = Size(
    width=1024, heads=16, kv_heads=8, windows=(256, None, 256, None), seq=2048, batch=4, steps=60, dtype=jnp.bfloat16
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows `[B, S]` of several documents: tokens, document ids (-1 for padding), and positions within the document."""

    tokens: Array
    ids: Array
    positions: Array


def batches(size: Size) -> Iterator[Batch]:
    """Documents that count modulo the vocabulary, each with its own random first token and step."""
    draw = np.random.default_rng(0)
    for _ in range(size.steps):
        documents: list[Any] = []
        while sum(len(document) for document in documents) < 2 * size.batch * size.seq:
            first, step = draw.integers(1, VOCABULARY, 2)
            length = draw.integers(size.seq // 8, size.seq // 2)
            documents.append((first + step * np.arange(length)).astype(np.int32) % VOCABULARY)
        rows = pack_rows(documents, size.seq)
        yield Batch(
            **{
                name: jnp.asarray(x[: size.batch], jnp.int32)
                for name, x in (("tokens", rows.data), ("ids", rows.segment_ids), ("positions", rows.positions))
            }
        )


# ----------------------------------------------------------------------------------------------------- how to attend


def by_documents(op: Callable[..., Any], **fixed: Any) -> Attend:
    """`op` as an `attention_fn` whose argument `mask` holds the ids of documents `[B, S]`."""

    @wraps(attention_fn(op, **fixed))
    def attend(query: Array, key: Array, value: Array, *, mask: Array, **options: Any) -> Array:
        bound = attention_fn(op, **fixed, q_segment_ids=mask, kv_segment_ids=mask)
        return bound(query, key, value, **options)

    return attend


def capped_einsum(formula: str, query: Array, key: Array, **options: Any) -> Array:
    """The scores of Flax's own attention with a cap. q is scaled already."""
    return CAP * jnp.tanh(jnp.einsum(formula, query, key, **options) / CAP)


def own_attention(query: Array, key: Array, value: Array, *, mask: Array, **_options: Any) -> Array:
    """Flax's own attention, which holds all scores in memory."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    o: Array = linen.dot_product_attention(
        query, key, value, mask=mask, qk_attn_weights_einsum=capped_einsum, attn_weights_value_einsum=jnp.einsum
    )
    return o


def own_mask(ids: Array, reach: int) -> Array:
    """The mask `[B, 1, S, S]`, True where a query sees a key."""
    places = jnp.arange(ids.shape[1])[None]
    distance = places[:, :, None] - places[:, None, :]
    seen = (distance >= 0) & (distance <= reach) & (ids[:, :, None] == ids[:, None, :])
    return seen[:, None]


# ------------------------------------------------------------------------------------------------------------- linen


class LinenModel(linen.Module):
    """Tokens `[B, S]` to logits `[B, S, vocabulary]`. `ours`: attention by the ops."""

    size: Size
    ours: bool

    def attend(self, layer: int, batch: Batch) -> tuple[Attend, Array | None]:
        """The `attention_fn` of a layer for this batch, and its mask."""
        reach = self.size.reach(layer)
        if not self.ours:
            return own_attention, own_mask(batch.ids, reach)
        numbers = {"before": reach, "after": 0, "cap": CAP}
        documents = {"q_segment_ids": batch.ids, "kv_segment_ids": batch.ids}
        return attention_fn(ops.band_softcap, **numbers, **documents), None

    @linen.compact
    def __call__(self, batch: Batch) -> Array:
        size = self.size
        made = {"dtype": size.dtype}
        embed = linen.Embed(VOCABULARY, size.width, **made)
        x = embed(batch.tokens) + linen.Embed(size.seq, size.width, **made)(batch.positions)
        for layer in range(len(size.windows)):
            attend, mask = self.attend(layer, batch)
            attention = linen.MultiHeadDotProductAttention(size.heads, use_bias=False, attention_fn=attend, **made)
            x = x + attention(linen.RMSNorm(**made)(x), mask=mask)
            inner = linen.gelu(linen.Dense(4 * size.width, **made)(linen.RMSNorm(**made)(x)))
            x = x + linen.Dense(size.width, **made)(inner)
        logits: Array = embed.attend(linen.RMSNorm(**made)(x))
        return logits


def train_linen(size: Size, ours: bool) -> list[float]:
    """The loss before each step."""
    model, optimizer = LinenModel(size, ours), optax.adam(3e-3)

    def loss_of(parameters: Any, batch: Batch) -> Array:
        logits: Any = model.apply(parameters, batch)
        return loss(logits, batch)

    @jax.jit
    def step(state: Any, batch: Batch) -> tuple[Any, Array]:
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        changes, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(parameters, changes), moments), value

    data = list(batches(size))
    parameters = jax.jit(model.init)(jax.random.key(0), data[0])
    state, losses = (parameters, optimizer.init(parameters)), []
    for batch in data:
        state, value = step(state, batch)
        losses.append(value)
    return [float(value) for value in losses]


# --------------------------------------------------------------------------------------------------------------- nnx


class NnxBlock(nnx.Module):
    """One layer. It has fewer key heads than query heads, which linen's attention does not support."""

    def __init__(self, size: Size, attend: Attend, rngs: nnx.Rngs) -> None:
        made: dict[str, Any] = {"dtype": size.dtype, "rngs": rngs}
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(size.width, **made), nnx.RMSNorm(size.width, **made)
        self.attention = nnx.MultiHeadAttention(
            size.heads,
            size.width,
            num_kv_heads=size.kv_heads,
            use_bias=False,
            attention_fn=attend,
            decode=False,
            **made,
        )
        self.mlp_in = nnx.Linear(size.width, 4 * size.width, **made)
        self.mlp_out = nnx.Linear(4 * size.width, size.width, **made)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        y: Array = x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))
        return y


class NnxModel(nnx.Module):
    """Tokens `[B, S]` to logits `[B, S, vocabulary]`. `ours`: attention by the ops."""

    def __init__(self, size: Size, ours: bool, rngs: nnx.Rngs) -> None:
        made: dict[str, Any] = {"dtype": size.dtype, "rngs": rngs}
        self.reaches = tuple(size.reach(layer) for layer in range(len(size.windows)))
        self.ours = ours
        self.embed = nnx.Embed(VOCABULARY, size.width, **made)
        self.places = nnx.Embed(size.seq, size.width, **made)
        attends = [
            by_documents(ops.band_softcap, before=reach, after=0, cap=CAP) if ours else own_attention
            for reach in self.reaches
        ]
        self.blocks = nnx.List([NnxBlock(size, attend, rngs) for attend in attends])
        self.norm = nnx.RMSNorm(size.width, **made)

    def __call__(self, batch: Batch) -> Array:
        x = self.embed(batch.tokens) + self.places(batch.positions)
        for block, reach in zip(self.blocks, self.reaches, strict=True):
            x = block(x, batch.ids if self.ours else own_mask(batch.ids, reach))
        logits: Array = self.embed.attend(self.norm(x))
        return logits


def train_nnx(size: Size, ours: bool) -> list[float]:
    """The loss before each step."""
    model = NnxModel(size, ours, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: NnxModel, optimizer: nnx.Optimizer[NnxModel], batch: Batch) -> Array:
        value: Array
        value, gradients = nnx.value_and_grad(lambda model: loss(model(batch), batch))(model)
        optimizer.update(model, gradients)
        return value

    return [float(value) for value in [step(model, optimizer, batch) for batch in batches(size)]]


# --------------------------------------------------------------------------------------------------------------- both


def loss(logits: Array, batch: Batch) -> Array:
    """Mean cross-entropy of each document's next tokens, in nats."""
    ids = batch.ids
    counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), batch.tokens[:, 1:])
    mean: Array = (losses * counts).sum() / counts.sum()
    return mean


def compared(train: Callable[[Size, bool], list[float]], size: Size) -> tuple[float, Sequence[float]]:
    """The largest relative difference of two trainings' losses, and the losses with the ops."""
    ours, own = train(size, True), train(size, False)
    return max(abs(a - b) / b for a, b in zip(ours, own, strict=True)), ours


def main() -> int:
    """Train with both APIs; returns 0 if the losses agree and fall."""
    parser = argparse.ArgumentParser(prog="python -m examples.flax_recipes", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU")
    size = FULL if parser.parse_args().full else SMALL
    platform = jax.default_backend()
    print(f"{len(size.windows)} layers, windows {size.windows}, {size.batch} rows of {size.seq} on {platform}.")
    right = True
    for name, train in (("linen", train_linen), ("nnx", train_nnx)):
        start = time.perf_counter()
        difference, losses = compared(train, size)
        right &= difference <= BOUND[platform] and losses[-1] < 0.9 * losses[0]
        seconds = time.perf_counter() - start
        print(f"  {name:6} losses {losses[0]:.3f} to {losses[-1]:.3f}, difference {difference:.1e}, {seconds:.1f} s")
    print("All is well: the ops train as Flax's own attention does." if right else "FAILED: see above.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
