"""A GPT in Flax NNX on packed documents, with an optimizer; attention by one implementation or another."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from bench.cases.models import OURS, ModelCase
from generated import jax as ops

GIB = 2**30

Attend = Callable[[Array, Array, Array], Array]
"""Attention of q `[B, S, Hq, D]` on k and v `[B, S, Hkv, D]`."""


class Block(nnx.Module):
    """One pre-norm layer. Each call takes the attention function, which depends on the documents of the batch."""

    def __init__(self, case: ModelCase, dtype: Any, rngs: nnx.Rngs) -> None:
        size = case.config
        width, inner = size["hidden_size"], size["intermediate_size"]
        self.heads, self.kv_heads = size["num_attention_heads"], size["num_key_value_heads"]
        self.head_dim = width // self.heads
        columns = (self.heads + 2 * self.kv_heads) * self.head_dim

        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.qkv, self.out = linear(width, columns), linear(width, width)
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.mlp_in, self.mlp_out = linear(width, inner), linear(inner, width)

    def __call__(self, x: Array, attend: Attend) -> Array:
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(heads, (self.heads, self.heads + self.kv_heads), axis=2)
        x = x + self.out(attend(q, k, v).reshape(x.shape))
        y: Array = x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))
        return y


class Gpt(nnx.Module):
    """Maps tokens `[B, S]` to logits `[B, S, vocabulary]`."""

    def __init__(self, case: ModelCase, dtype: Any, rngs: nnx.Rngs) -> None:
        width = case.config["hidden_size"]
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(case.vocabulary, width, dtype=dtype, param_dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(case, dtype, rngs) for _ in range(case.layers)])
        self.norm = nnx.RMSNorm(width, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array, attend: Attend) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attend)
        logits: Array = self.embed.attend(self.norm(x))
        return logits


def attend_by(implementation: str, ids: Array, case: ModelCase, dtype: Any) -> Attend:
    """Causal attention inside documents `ids` `[B, S]`. The layers' schedule or mask is made here, once a step."""
    if implementation == OURS:
        heads, kv_heads = case.config["num_attention_heads"], case.config["num_key_value_heads"]
        q = jnp.zeros((*ids.shape, heads, case.config["hidden_size"] // heads), dtype)
        k = jnp.zeros((*ids.shape, kv_heads, q.shape[-1]), dtype)
        said: dict[str, Any] = {"q_segment_ids": ids, "kv_segment_ids": ids}
        schedule = ops.causal.schedule(q, k, k, **said)
        op: Any = ops.causal
        return lambda q, k, v: op(q, k, v, **said, schedule=schedule)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & jnp.tri(ids.shape[1], dtype=bool)[None, None]
    kernels: Any = implementation
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernels)


class FlaxTrainee:
    """The GPT of a case with AdamW; on a GPU in bfloat16."""

    def __init__(self, case: ModelCase, device: str) -> None:
        if (device == "cuda") != (jax.default_backend() == "gpu"):
            raise RuntimeError(f"JAX runs on {jax.default_backend()} here: install jax[cuda13]")
        self.case = case
        self.dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
        self.graph, model = nnx.split(Gpt(case, self.dtype, nnx.Rngs(0)))
        self.rule = optax.adamw(1e-9)
        self.state = model, self.rule.init(model)
        numbers = np.repeat(np.arange(len(case.documents), dtype=np.int32), case.documents)
        self.ids = jnp.asarray(np.tile(numbers, (case.batch, 1)))
        self.tokens = jax.random.randint(jax.random.key(0), self.ids.shape, 0, case.vocabulary)
        self.compiled: dict[str, Any] = {}

    def use(self, implementation: str) -> Callable[[], Array]:
        if implementation not in self.compiled:
            self.compiled[implementation] = self._compiled(implementation)
        program = self.compiled[implementation]

        def step() -> Array:
            loss: Array
            self.state, loss = program(self.state, self.tokens, self.ids)
            return loss

        step.program = program  # type: ignore[attr-defined]
        return step

    def _compiled(self, implementation: str) -> Any:
        def step(state: Any, tokens: Array, ids: Array) -> tuple[Any, Array]:
            model, moments = state
            attend = attend_by(implementation, ids, self.case, self.dtype)

            def loss_of(model: Any) -> Array:
                logits = nnx.merge(self.graph, model)(tokens, attend).astype(jnp.float32)
                losses: Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
                return losses.mean()

            loss, gradients = jax.value_and_grad(loss_of)(model)
            changes, moments = self.rule.update(gradients, moments, model)
            return (optax.apply_updates(model, changes), moments), loss

        return jax.jit(step, donate_argnums=0).lower(self.state, self.tokens, self.ids).compile()

    def wait(self, loss: Array) -> float:
        return float(loss)

    def peak_gib(self, step: Any) -> float | None:
        """The memory that XLA plans for the compiled step: the device's peak cannot be reset between two programs."""
        if jax.default_backend() != "gpu":
            return None
        plan = step.program.memory_analysis()
        held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        return float(held + plan.temp_size_in_bytes) / GIB

    def release(self) -> None:
        """Free nothing: only the arguments outlive a program that failed."""
