# SPDX-License-Identifier: Apache-2.0
"""The random words of dropout in plain JAX. They equal those of the kernels and those of `philox.py` for torch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checks import keep_numbers

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32-bit word of the product of two words, from products of 16-bit halves."""
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    middle = x_low * high + (x_low * low >> 16)
    carried = x_high * low + (middle & 0xFFFF)
    return x_high * high + (middle >> 16) + (carried >> 16), x * np.uint32(factor)


def philox4x32(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[jax.Array, ...]:
    """Four words for each counter, as `triton.language.philox` gives them in 7 rounds.

    `seed` is an int, or uint32 `[2]`."""
    words = [seed & 0xFFFFFFFF, seed >> 32] if isinstance(seed, int) else seed
    k0, k1 = (jnp.asarray(word, jnp.uint32) for word in words)
    c0, c1, c2, c3 = jnp.broadcast_arrays(*(jnp.asarray(c).astype(jnp.uint32) for c in (c0, c1, c2, c3)))
    for _ in range(_ROUNDS):
        upper_0, lower_0 = _product(c0, _MULTIPLIERS[0])
        upper_2, lower_2 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = upper_2 ^ c1 ^ k0, lower_2, upper_0 ^ c3 ^ k1, lower_0
        k0, k1 = k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1])
    return c0, c1, c2, c3


def dropout_words(seed: Any, head: Any, row: Any, key: Any) -> jax.Array:
    """The random word that decides whether a probability is dropped. All arguments broadcast.

    `head` counts over all batch rows. The upper byte of the word is one of the 16 bytes of a counter's four words. The
    lower three bytes are the upper three of the exclusive or of these four words: see `philox.py` for torch.
    """
    four = philox4x32(seed, key >> 5 << 2 | key >> 1 & 3, row >> 4 << 3 | row & 7, head, 0)
    of_row = [jnp.where((row & 8) > 0, four[2 * bit + 1], four[2 * bit]) for bit in (0, 1)]
    own = jnp.where((key & 16) > 0, of_row[1], of_row[0])
    place = jnp.asarray((key & 1) << 4 | key & 8).astype(jnp.uint32)
    shared: jax.Array = (four[0] ^ four[1] ^ four[2] ^ four[3]) >> 8
    return (own >> place) << 24 | shared


def dropout(probs: jax.Array, dropout_p: float, seed: Any, head: Any, row: Any, key: Any) -> jax.Array:
    """Probabilities, each set to 0 with probability `dropout_p`, else divided by `1 - dropout_p`."""
    threshold, keep_scale = keep_numbers(dropout_p)
    drop = dropout_words(seed, head, row, key) < np.uint32(threshold)
    return jnp.where(drop, 0.0, probs * keep_scale)
