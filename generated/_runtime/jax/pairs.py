# SPDX-License-Identifier: Apache-2.0
"""Arrays with an element for each pair of query and key, as `jax.nn` takes them: checks, and four axes for an op."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.checks import fail
from .support import as_array


def checked_mask(title: str, x: Any, sizes: tuple[int, int, int, int]) -> Array:
    """A boolean mask with four axes. Each has size 1 or that of `sizes`, which are [B, N, T, S]."""
    mask = as_array(title, "mask", x, "a bool array, with True where a query sees a key")
    if mask.dtype != jnp.bool_:
        fail(title, "mask", "a bool array, with True where a query sees a key", f"{mask.dtype.name} {list(mask.shape)}")
    return _four_axes(title, "mask", mask, sizes)


def checked_bias(title: str, x: Any, sizes: tuple[int, int, int, int]) -> Array:
    """A bias with four axes, as `checked_mask`, in float32: an axis that is expanded sums its gradient in float32."""
    bias = as_array(title, "bias", x, "an array of real numbers")
    if jnp.issubdtype(bias.dtype, jnp.complexfloating):
        fail(title, "bias", "an array of real numbers", f"{bias.dtype.name} {list(bias.shape)}")
    return _four_axes(title, "bias", bias.astype(jnp.float32), sizes)


def _four_axes(title: str, name: str, x: Array, sizes: tuple[int, int, int, int]) -> Array:
    shape = (*([1] * (4 - x.ndim)), *x.shape)
    if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, sizes, strict=True)):
        fail(title, name, f"a shape that broadcasts to [B, N, T, S] = {list(sizes)}", list(x.shape))
    return x.reshape(shape)


def masked_bias(bias: Array, mask: Array | None) -> Array:
    """A bias that is -inf where the mask is False. The ops give such a pair a probability of 0."""
    return bias if mask is None else jnp.where(mask, bias, jnp.asarray(-math.inf, bias.dtype))
