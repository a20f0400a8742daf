# SPDX-License-Identifier: Apache-2.0
"""`generated.float8` for JAX: 8-bit arrays with their scales, and rotations. All values equal those of torch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.checks import fail
from ..core.fp8 import FP8, LARGEST, LEAST_SCALE
from .sequences import begins_of


def quantize(x: Array, cu_seqlens: Array | None, layout: str) -> tuple[Array, Array]:
    """x in 8 bits, and its scales. The arguments are checked already."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    if cu_seqlens is None:
        axes = (2, 3) if layout == "bhsd" else (1, 3)
        scale = _scale_of(jnp.abs(x).max(axes, initial=0.0))
        return _divided(x, jnp.expand_dims(scale, axes)), scale
    cu_seqlens = begins_of("quantize", "cu_seqlens", cu_seqlens, "x", x)
    count = cu_seqlens.shape[0] - 1
    sequence = jnp.searchsorted(cu_seqlens[1:], jnp.arange(x.shape[0], dtype=cu_seqlens.dtype), side="right")
    # The maximum of a sequence without tokens is -inf.
    largest = jax.ops.segment_max(jnp.abs(x).max(2), sequence, count, indices_are_sorted=True)
    scale = _scale_of(jnp.maximum(largest, 0.0))
    return _divided(x, scale[sequence][:, :, None]), scale


def _scale_of(largest: Array) -> Array:
    return jnp.maximum(quotient(largest, LARGEST), LEAST_SCALE)


def _divided(x: Array, scale: Array) -> Array:
    return jnp.clip(quotient(x, scale), -LARGEST, LARGEST).astype(FP8)


def quotient(x: Array, divisor: Any) -> Array:
    """A quotient, rounded once, as in torch."""
    # XLA would multiply by the reciprocal of a broadcast divisor. The where hides from it that this one is broadcast.
    return x / jnp.where(jnp.isnan(x), x, divisor)


def hadamard(columns: int, seed: int, like: Array, dtype: Any, device: Any) -> Array:
    """A Hadamard matrix with random signs. The other arguments are checked already."""
    try:
        dtype = jnp.dtype(like.dtype if dtype is None else dtype)
    except TypeError:
        fail("hadamard", "dtype", "a dtype of floats that JAX has, as that of `like`", repr(dtype))
    if not jnp.issubdtype(dtype, jnp.floating):
        fail("hadamard", "dtype", "a dtype of floats", dtype)
    if not isinstance(device, (type(None), jax.Device, jax.sharding.Sharding)):
        fail("hadamard", "device", "None, a jax.Device or a sharding, as `like` is an array of JAX", repr(device))
    matrix = np.ones((1, 1))
    while len(matrix) < columns:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    # These are the bits of torch's generator, which is the same Mersenne Twister.
    drawn = np.random.RandomState(seed).randint(0, 2**32, (columns, 1), dtype=np.uint32)
    turn = matrix * np.where(drawn & 1, 1.0, -1.0) / columns**0.5
    return jnp.asarray(turn, dtype, device=device)
