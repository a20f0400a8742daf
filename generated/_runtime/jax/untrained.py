# SPDX-License-Identifier: Apache-2.0
"""Arguments without a gradient: to ask for one is an error, where JAX by itself would give zeros."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..core.checks import ArgumentError
from .passes import Call, Kernels
from .support import is_known

_REMEDY = "detach it with jax.lax.stop_gradient"
_OF_TENSOR = f'variants.yaml declares it without a gradient: add "grad: true" to its entry, or {_REMEDY}'
_OF_MASK = f"only the mask reads it, which has no gradient: {_REMEDY}"
_OF_SCALAR = f"a scalar has no gradient: declare a tensor of dims [] with grad: true in its place, or {_REMEDY}"


def without_gradients(kernels: Kernels, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a call; to differentiate by a floating-point one that has no gradient raises an ArgumentError."""
    return [_guarded(kernels, name, x) for name, x in zip(call.operands, arrays, strict=True)]


def _guarded(kernels: Kernels, name: str, x: jax.Array) -> jax.Array:
    # Nothing is differentiated by an array that has values.
    if name in ("q", "k", "v", *kernels.gradients) or is_known(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    reason = _OF_SCALAR if name in kernels.scalars else _OF_MASK if name in kernels.mask_only else _OF_TENSOR
    guarded: jax.Array = _fixed(f"{kernels.op}: {name}: it requires grad, but {reason}", x)
    return guarded


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fixed(message: str, x: jax.Array) -> jax.Array:
    """`x` itself. Unlike that of a custom_vjp, the rule is also told inside shard_map whether `x` has a tangent."""
    del message
    return x


@partial(_fixed.defjvp, symbolic_zeros=True)
def _fixed_jvp(message: str, primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise ArgumentError(message)
    return primals[0], tangents[0]
