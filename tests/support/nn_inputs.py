"""Inputs in the shapes of `jax.nn.dot_product_attention`, and how close results must be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

B, T, S, N, K, H = 3, 13, 17, 4, 2, 16
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
"""float32: sums of at most 17 terms around 1 and exps of scores around 1, rounded in another order; measured 2e-6."""


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def drawn(*, query_len: int = T, key_len: int = S, kv_heads: int = K, dtype: Any = np.float32) -> tuple[Array, ...]:
    q = normal(1, B, query_len, N, H, dtype=dtype)
    return q, normal(2, B, key_len, kv_heads, H, dtype=dtype), normal(3, B, key_len, kv_heads, H, dtype=dtype)


def assert_close(got: Any, want: Any, **tolerance: float) -> None:
    """Check that two trees of arrays have equal shapes and dtypes, and close values."""
    bounds: Any = {**CLOSE, **tolerance}
    (found, structure), (wanted, like) = jax.tree.flatten(got), jax.tree.flatten(want)
    assert str(structure) == str(like)
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), **bounds)
