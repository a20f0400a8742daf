# SPDX-License-Identifier: Apache-2.0
"""Functions of a reference that choose one of their arguments. Where they choose another, an argument has no gradient.

It is not 0 times the gradient of the result, which may be infinite, as in `sqrt(max(score, 0))`. At a kink the
derivatives are those of `codegen.ir.derive`.
"""

from typing import Any

import jax
import jax.numpy as jnp


def maximum(x: Any, y: Any) -> Any:
    """The larger of two floats; equal ones get half of the gradient each."""
    return jnp.where(x > y, x, jnp.where(x < y, y, 0.5 * x + 0.5 * y))


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two floats; equal ones get half of the gradient each."""
    return jnp.where(x < y, x, jnp.where(x > y, y, 0.5 * x + 0.5 * y))


def clamp(x: Any, low: Any, high: Any) -> Any:
    """`x` limited to `low` .. `high`, `high` where `high < low`; at both ends `x` gets the gradient."""
    return jnp.where((x > high) | (low > high), high, jnp.where(x < low, low, x))


def absolute(x: Any) -> Any:
    """`|x|`, without a gradient at 0, where that of jnp.abs is 1."""
    return jnp.where(x > 0, x, jnp.where(x < 0, -x, jnp.abs(jax.lax.stop_gradient(x))))
