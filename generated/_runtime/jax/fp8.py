# SPDX-License-Identifier: Apache-2.0
"""Calls of float8_e4m3fn in JAX: 8-bit q, k and v, each with a scale for each head. They have no gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from ..core.checks import check_factor, fail
from ..core.fp8 import FP8, SCALES, check_ends_of_scale, scale_text
from .kernels import INTERPRET
from .passes import BEGINS, LOGICAL, Call, Forward, Kernels, keywords
from .primitive import attention_primitive
from .sharding import varying_alike
from .support import canonical, host_number, is_array, values_are_checked
from .tensor import BF16


def checked_scales(op: str, scales: Sequence[Any], rows: int, heads: tuple[int, int]) -> dict[str, jax.Array]:
    """The scales of q, k and v by name, as float32 `[rows, heads]`. `heads`: the numbers of heads of q and of k."""
    sizes = (heads[0], heads[1], heads[1])
    return {name: _scale(op, name, x, rows, h) for name, x, h in zip(SCALES, scales, sizes, strict=True)}


def _scale(op: str, name: str, scale: Any, rows: int, heads: int) -> jax.Array:
    """A scale as float32 `[rows, heads]`. Rows are batch rows or packed sequences.

    It is given as a number, as floats `[heads]` or `[rows, heads]`, or as an array `[]`, which may be traced.
    """
    scale = canonical(scale if isinstance(scale, jax.Array) else host_number(op, name, scale))
    if not is_array(scale):
        if scale is None:
            fail(op, name, scale_text(rows, heads), "None")
        return jnp.full((rows, heads), check_factor(op, name, scale), jnp.float32)
    if scale.shape not in ((), (heads,), (rows, heads)) or not jnp.issubdtype(scale.dtype, jnp.floating):
        fail(op, name, scale_text(rows, heads), f"{scale.dtype.name} {list(scale.shape)}")
    if scale.size > 0 and values_are_checked(scale):
        found = np.asarray(scale)
        check_ends_of_scale(op, name, float(found.min()), float(found.max()))
    return jnp.broadcast_to(scale.astype(jnp.float32), (rows, heads))


class ScaledForward(Forward):
    """The forward of 8-bit calls as launches and as reference. o is bfloat16. The last operands are the `SCALES`."""

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        (o, _), *others = super().shapes(call, avals)
        return [(o, BF16), *others]

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if INTERPRET:
            # Triton's interpreter cannot run Hopper's kernels.
            return self.reference(call, arrays)
        kernels, given = self.kernels, keywords(self.kernels, call, call.named(arrays))
        given["scales"] = tuple(given[name] for name in SCALES)
        return [x.value() for x in kernels.launched(kernels.launches.forward, given)]

    def plain(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        operands = call.named(arrays)
        scales = {name: operands.pop(name) for name in SCALES}
        begins = [operands.get(name) for name in (BEGINS[0], BEGINS[1], BEGINS[1])]
        for name, scale, begin in zip("qkv", scales.values(), begins, strict=True):
            operands[name] = _dequantised(operands[name], scale, begin, call)
        o, *others = super().plain(replace(call, operands=tuple(operands)), list(operands.values()))
        return [o.astype(BF16), *others]


def _dequantised(x: jax.Array, scale: jax.Array, cu_seqlens: jax.Array | None, call: Call) -> jax.Array:
    """`x`, which has the layout of the call, times its scale, in float32."""
    wide = x.astype(jnp.float32)
    if cu_seqlens is None:
        _, _, rows, columns = LOGICAL[call.layout]
        return wide * jnp.expand_dims(scale, (rows, columns))
    sequence = jnp.searchsorted(cu_seqlens[1:], jnp.arange(x.shape[0], dtype=cu_seqlens.dtype), side="right")
    return wide * scale[sequence][:, :, None]


@cache
def _primitive_of(kernels: Kernels) -> Primitive:
    primitive = attention_primitive(f"{kernels.name}_fp8", ScaledForward(kernels))
    ad.primitive_jvps[primitive] = partial(_refuse_derivative, kernels.op)
    return primitive


def _refuse_derivative(op: str, _primals: Any, tangents: Sequence[Any], *, call: Call) -> NoReturn:
    name = next(name for name, x in zip(call.operands, tangents, strict=True) if not isinstance(x, ad.Zero))
    expected = f"an array without gradient: calls of {FP8} have none"
    fail(op, name, expected, "one that is differentiated; jax.lax.stop_gradient detaches it")


def attend_scaled(kernels: Kernels, call: Call, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """o, in bfloat16, and lse of a call."""
    o, lse, *_ = _primitive_of(kernels).bind(*varying_alike(arrays), call=call)
    return o, lse
