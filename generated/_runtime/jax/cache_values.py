# SPDX-License-Identifier: Apache-2.0
"""The values in the caches of a paged call: their dtypes, among them 8-bit floats, and their scales."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.checks import check_factor
from ..core.paged import FP8, check_factors, check_scale_given
from ..core.paged_calls import check_cache_dtype, check_converts, check_scale_array
from .support import canonical, host_number, is_array, is_integer, values_are_checked


class CacheScale(NamedTuple):
    """The scale of a cache: its values are multiplied by `number`, and by `array` if that is not None.

    `array` has floats `[Hkv]` or `[pages, page size, Hkv]`.
    """

    number: float
    array: jax.Array | None


def check_cache_dtypes(op: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Check the dtypes of caches against that of q."""
    for name, x in (("k", k), ("v", v)):
        check_cache_dtype(op, name, x.dtype.name, q.dtype.name, FP8)


def checked_scale(op: str, name: str, scale: Any, dtype: Any, cache: tuple[int, ...]) -> CacheScale:
    """The scale of a cache `[pages, page size, Hkv, D]` of this dtype.

    An array `[]` is the scale of every key head. Its value may be traced.
    """
    check_scale_given(op, name, scale, dtype.name)
    scale = canonical(host_number(op, name, scale) if not isinstance(scale, jax.Array) else scale)
    if not is_array(scale):
        return CacheScale(1.0 if scale is None else check_factor(op, name, scale), None)
    if scale.shape == ():
        number = scale.astype(jnp.float32) if is_integer(scale.dtype) else scale
        scale = jnp.broadcast_to(number, cache[2:3])
    fits = bool(jnp.issubdtype(scale.dtype, jnp.floating))
    check_scale_array(op, name, scale.shape, cache, fits=fits, where="", got=f"{scale.dtype.name} {list(scale.shape)}")
    if scale.ndim == 1 and values_are_checked(scale):
        check_factors(op, name, scale.tolist())
    return CacheScale(1.0, scale)


def check_converts_for(op: str, arch: str | None, caches: Mapping[str, jax.Array]) -> None:
    """Check that the architecture that kernels are compiled for can convert the dtypes of the caches."""
    if arch is not None and arch.startswith("sm_"):
        number = int(arch.removeprefix("sm_"))
        for name, x in caches.items():
            check_converts(op, name, x.dtype.name, (number // 10, number % 10))


def dequantised(x: jax.Array, scale: jax.Array | None, factor: float, page: jax.Array, slot: jax.Array) -> jax.Array:
    """The tokens of a cache at these pages and slots, `[tokens, Hkv, D]`, times the scale and `factor`."""
    found = x[page, slot]
    if x.dtype.name in FP8 or scale is not None or factor != 1.0:
        found = found.astype(jnp.float32) * factor
    if scale is not None:
        found *= (scale[page, slot] if scale.ndim == 3 else scale[None])[..., None].astype(jnp.float32)
    return found
