# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention by an op of this package, as a module of Equinox.

>>> from ..jax import alibi
>>> slope = 2.0 ** -jnp.arange(1.0, 5.0)
>>> layer = Attention(alibi, 64, heads=4, kv_heads=2, tensors={"slope": slope}, key=jax.random.key(0))
>>> layer(jnp.ones((24, 64))).shape
(24, 64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._runtime.core.checks import check_flag, check_int, fail

__all__ = ["Attention"]

_TITLE = "equinox.Attention"


class Attention(eqx.Module):
    """Linear layers for queries, keys and values, attention by an op, and a linear layer for its output.

    `equinox.nn.MultiheadAttention` takes a mask with an element per pair of query and key. Here the op's variant says
    which keys a query sees, and blocks without such keys are skipped. `tensors` are leaves of the module's pytree, so
    they are trained with the weights.
    """

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    tensors: dict[str, Array]
    op: Callable[..., Any] = eqx.field(static=True)
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)

    def __init__(
        self,
        op: Callable[..., Any],
        size: int,
        *,
        heads: int,
        key: Array,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = False,
        tensors: Mapping[str, Array] | None = None,
    ) -> None:
        """Weights are drawn as `equinox.nn.Linear` draws them.

        Args:
            op: an op for JAX.
            size: columns of inputs and results.
            heads: query heads.
            key: a key of `jax.random`.
            kv_heads: key heads, which divide the query heads; by default as many.
            head_dim: columns of a head; by default `size // heads`.
            use_bias: whether the linear layers add a bias.
            tensors: arguments of the op that are trained, such as slopes, sinks or a table of biases.

        Raises:
            ArgumentError: a number below 1, `kv_heads` that does not divide `heads`, or without `head_dim`, `heads`
                that does not divide `size`.
        """
        size = check_int(_TITLE, "size", size, 1)
        heads = check_int(_TITLE, "heads", heads, 1)
        kv_heads = heads if kv_heads is None else check_int(_TITLE, "kv_heads", kv_heads, 1)
        head_dim = head_dim if head_dim is None else check_int(_TITLE, "head_dim", head_dim, 1)
        use_bias = check_flag(_TITLE, "use_bias", use_bias)
        if heads % kv_heads:
            fail(_TITLE, "kv_heads", f"a number that divides {heads} heads", kv_heads)
        if head_dim is None and size % heads:
            fail(_TITLE, "head_dim", f"a number, since {heads} heads do not divide size {size}", head_dim)
        columns = size // heads if head_dim is None else head_dim
        keys = jax.random.split(key, 4)
        self.query = eqx.nn.Linear(size, heads * columns, use_bias, key=keys[0])
        self.key = eqx.nn.Linear(size, kv_heads * columns, use_bias, key=keys[1])
        self.value = eqx.nn.Linear(size, kv_heads * columns, use_bias, key=keys[2])
        self.output = eqx.nn.Linear(heads * columns, size, use_bias, key=keys[3])
        self.tensors = dict(tensors or {})
        self.op, self.heads, self.kv_heads = op, heads, kv_heads

    def __call__(self, x: Array, context: Array | None = None, **arguments: Any) -> Array:
        """Attention of `x` to `context`, by default to itself.

        A whole batch in one call needs no `jax.vmap`. Arguments with a batch axis have the shapes that the op takes. An
        `x` of two axes is one sequence, or packed sequences if `cu_seqlens_q` is among the arguments.

        Args:
            x: `[B, S, size]` or `[S, size]`.
            context: `[B, Skv, size]` or `[Skv, size]`, from which keys and values are computed.
            **arguments: the op's own keywords, such as scalars, ids of documents, or `cu_seqlens_q`; not `layout` and
                `return_lse`.

        Returns:
            `[B, S, size]`, or `[S, size]` where `x` has two axes.

        Raises:
            ArgumentError: a shape that does not fit, or an argument that the op refuses.
        """
        context = x if context is None else context
        size = self.query.in_features
        for name in ("layout", "return_lse"):
            if name in arguments:
                fail(_TITLE, name, "nothing: the module has one layout, and returns o alone", repr(arguments[name]))
        for name, given in (("x", x), ("context", context)):
            if given.ndim not in (2, 3) or given.ndim != x.ndim or given.shape[-1] != size:
                expected = f"shape [B, S, {size}] or [S, {size}]" + (" as x has" if name == "context" else "")
                fail(_TITLE, name, expected, list(given.shape))
        heads = [
            _by_token(layer, given).reshape(*given.shape[:-1], count, layer.out_features // count)
            for layer, given, count in (
                (self.query, x, self.heads),
                (self.key, context, self.kv_heads),
                (self.value, context, self.kv_heads),
            )
        ]
        alone = x.ndim == 2 and "cu_seqlens_q" not in arguments
        if alone:
            heads = [each[None] for each in heads]
        o: Array = self.op(*heads, **self.tensors, **arguments)
        o = o[0] if alone else o
        return _by_token(self.output, o.reshape(*o.shape[:-2], self.output.in_features))


def _by_token(layer: eqx.nn.Linear, x: Array) -> Array:
    """Apply a linear layer, which Equinox defines for one vector, to every row of `x`."""
    *axes, columns = x.shape
    rows = jax.vmap(layer)(jnp.reshape(x, (math.prod(axes), columns)))
    return jnp.reshape(rows, (*axes, rows.shape[-1]))
