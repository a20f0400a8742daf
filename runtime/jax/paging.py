"""`append` of `generated.paging` for JAX: a scatter, which XLA does in place if the caches are donated."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.checks import fail
from ..core.paged import check_divisor, check_divisors, check_last_slot, check_token_scale
from ..core.paged_calls import PAGE_LAYOUTS
from .float8 import quotient
from .support import ends, values_are_checked

_OP = "append"


def append(
    k: Array,
    v: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    slots: Array,
    k_scale: Any,
    v_scale: Any,
    page_layout: str,
) -> tuple[Array | None, ...]:
    """The caches with k and v in their slots, then the token scales, if given. k and v are checked already."""
    axes = PAGE_LAYOUTS[page_layout]
    size = k_cache.shape[axes[1]]
    if slots.size > 0 and values_are_checked(slots):
        check_last_slot(ends(slots)[1], k_cache.shape[0], size)
    slots = slots.astype(jnp.int32)  # smaller integers may not hold the number of pages
    # mode="drop" skips a page number beyond the last page. A negative one would count from the end.
    page, place = jnp.where(slots < 0, k_cache.shape[0], slots // size), slots % size
    found: list[Array | None] = []
    written = []
    for name, x, cache, scale in (("k_scale", k, k_cache, k_scale), ("v_scale", v, v_cache, v_scale)):
        if x is None or cache is None:
            found.append(None)
            continue
        values = x
        if isinstance(scale, Array) and scale.ndim == 3:
            check_token_scale(
                name, scale.shape, tuple(cache.shape[axis] for axis in axes), jnp.dtype(cache.dtype).itemsize
            )
            if scale.dtype != jnp.float32:
                fail(_OP, name, "float32 beside a cache, as it is written", scale.dtype)
            own = quotient(jnp.abs(x.astype(jnp.float32)).max(-1), float(jnp.finfo(cache.dtype).max))
            own = jnp.where(own == 0.0, 1.0, own)
            written.append(scale.at[page, place].set(own.astype(scale.dtype), mode="drop"))
            values = quotient(x.astype(jnp.float32), own[..., None])
        elif scale is not None:
            values = quotient(x.astype(jnp.float32), _by_head(name, scale, x.shape[1]))
        if jnp.dtype(cache.dtype).itemsize == 1:
            most = float(jnp.finfo(cache.dtype).max)
            values = jnp.clip(values.astype(jnp.float32), -most, most)
        written_slots = cache.at[page, place] if page_layout == "pshd" else cache.at[page, :, place]
        found.append(written_slots.set(values.astype(cache.dtype), mode="drop"))
    return *found, *written


def _by_head(name: str, scale: Any, heads: int) -> Any:
    """The scale of a cache: a number, or an array that broadcasts to its tokens."""
    if not isinstance(scale, Array):
        return check_divisor(name, scale)
    if scale.shape not in ((), (heads,)) or not jnp.issubdtype(scale.dtype, jnp.floating):
        fail(_OP, name, f"a number or floats [{heads}]", f"{scale.dtype} {list(scale.shape)}")
    if values_are_checked(scale):
        check_divisors(name, np.asarray(scale).reshape(-1).tolist())
    return jnp.broadcast_to(scale, (1, heads))[..., None]
