# SPDX-License-Identifier: Apache-2.0
"""The first keys of pruned calls in JAX, as `core/pruning.py` derives them, in float32.

The bound includes the rounding errors of float32, in the running sum and in the sums of its exponentials: `SUM_ERROR`
times the largest sum.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..core.checks import FLOAT_DTYPES, at_least, check_prune
from ..core.fp8 import check_unpruned
from ..core.options import checked_options
from ..core.pruning import GROUP, PRODUCT_ERROR, follow_rows
from .call import Arguments
from .sequences import SequenceArguments
from .support import check_tensor, host_number

SUM_ERROR = 2.0**-13
"""An upper bound of the rounding error of sums of up to 2**19 numbers, in two steps, relative to the largest sum."""


def first_keys(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    prune: float,
    scale: float | None,
    layout: str,
    sequences: SequenceArguments,
) -> jax.Array:
    """The position of the first key that each query attends to: int32 `[B, Hq, P]`, as `q_idx` counts; packed
    `[Hq, total_q]`.

    The arguments are those of the op. The keys before the first key have together at most `prune` of the row's
    denominator.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype or value.
    """
    log_share = math.log(check_prune(op, host_number(op, "prune", prune)))
    check_unpruned(op, prune, getattr(q, "dtype", ""))
    options = checked_options(op, None, None, None)
    call = Arguments.checked(op, q, k, v, sequences, options, layout=layout, scale=scale)
    heads = call.q.shape[1]
    if call.packed:
        g = check_tensor(op, "g", g, (call.k.shape[0], heads), FLOAT_DTYPES)
    else:
        size = max(call.row_offset + call.q.shape[2], call.k.shape[2])
        g = check_tensor(op, "g", g, (call.q.shape[0], at_least(size), heads), FLOAT_DTYPES)
    q, k, g = (jax.lax.stop_gradient(x) for x in (*call.arrays[:2], g))
    if call.packed:
        return _packed(call, q, k, g, log_share)
    if layout == "bshd":
        q, k = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)
    return _dense(call, q, k, g, log_share)


def _dense(call: Arguments, q: jax.Array, k: jax.Array, g: jax.Array, log_share: float) -> jax.Array:
    q_len, kv_len = q.shape[2], k.shape[2]
    if q.size == 0 or k.size == 0:
        return jnp.zeros((*q.shape[:2], max(g.shape[1], 1)), jnp.int32)
    shift = (jnp.full(1, call.row_offset) if call.row_offsets is None else call.row_offsets).reshape(-1, 1)
    own = jnp.arange(q_len)[None] + shift  # [B or 1, Sq]
    at, is_key = own.clip(0, kv_len - 1), (own >= 0) & (own < kv_len)
    total, error = _running_sum(jnp.swapaxes(g, 1, 2))  # [B, Hq, P]
    aligned = call.row_offsets is None and call.row_offset == 0 and q_len == kv_len
    own_keys = k if aligned else jnp.take_along_axis(k, at[:, None, :, None], 2)
    limit = _limits(q, own_keys, k, call.scale) + log_share - jnp.take_along_axis(total, at[:, None], 2) - error
    limit = jnp.where(is_key[:, None], limit, -jnp.inf)
    if call.tokens is not None:
        shape = (q.shape[0], q_len)
        q_ids = jnp.broadcast_to(call.tokens.q_segment_ids, shape)
        kv_ids = jnp.broadcast_to(call.tokens.kv_segment_ids, (q.shape[0], kv_len))
        same = jnp.take_along_axis(kv_ids, at, 1) == q_ids
        limit = jnp.where(same[:, None], limit, -jnp.inf)
        # Rows of padding attend to no key.
        limit = jnp.where((q_ids == call.padding_id)[:, None], jnp.inf, limit)
    groups = jnp.pad(limit, ((0, 0), (0, 0), (0, -q_len % GROUP)), constant_values=jnp.inf)
    groups = groups.reshape(*q.shape[:2], -1, GROUP).min(-1)
    found = jnp.repeat(_search(total[..., :kv_len], groups), GROUP, axis=-1)[..., :q_len]  # [B, Hq, Sq]
    if call.tokens is not None and call.tokens.kv_positions is not None:
        # Positions rise by 1 from row to row of a segment.
        positions = jnp.broadcast_to(call.tokens.kv_positions, (q.shape[0], kv_len))
        order = jnp.argsort(kv_ids, 1, stable=True)
        ids, by_id = (jnp.take_along_axis(x, order, 1) for x in (kv_ids, positions))
        follows = follow_rows(ids, by_id, order, call.padding_id)[:, None, None]
        by_position = found + (jnp.take_along_axis(positions, at, 1) - at)[:, None]
        found = jnp.where(follows, by_position, positions.min(1)[:, None, None])
    elif not aligned:
        # By position: row `p - offset`, or the nearest.
        rows = (jnp.arange(g.shape[1])[None] - shift).clip(0, q_len - 1)
        found = jnp.take_along_axis(found, rows[:, None], 2)
    return found.astype(jnp.int32)


def _packed(call: Arguments, q: jax.Array, k: jax.Array, g: jax.Array, log_share: float) -> jax.Array:
    total_q, total_k, heads = q.shape[0], k.shape[0], q.shape[1]
    if q.size == 0 or k.size == 0:
        return jnp.zeros((heads, total_q), jnp.int32)
    begins, kv_begins = call.cu_seqlens_q, call.cu_seqlens_k
    rows = jnp.arange(total_q, dtype=jnp.int32)
    # An empty sequence has no row. Rows after the last sequence belong to none, and are counted to the last.
    sequence = (jnp.searchsorted(begins, rows, side="right") - 1).clip(0, max(begins.shape[0] - 2, 0))
    row = rows - begins[sequence]
    start, end = kv_begins[sequence], kv_begins[sequence + 1]
    own = start + row + call.row_offset
    if call.row_offsets is not None:
        own = own + jnp.broadcast_to(call.row_offsets, (begins.shape[0] - 1,))[sequence]
    at, is_key = own.clip(0, total_k - 1), (own >= start) & (own < end)
    total, error = _running_sum(g.T)  # [Hq, total_k]
    by_head, keys = jnp.swapaxes(q, 0, 1), jnp.swapaxes(k, 0, 1)
    limit = _limits(by_head, keys[:, at], keys, call.scale) + log_share - total[:, at] - error
    limit = jnp.where(is_key[None], limit, -jnp.inf)
    group = begins[sequence] // GROUP + sequence + row // GROUP
    groups = jnp.full((heads, total_q // GROUP + begins.shape[0]), jnp.inf, limit.dtype).at[:, group].min(limit)
    found = (_search(total, groups)[:, group] - start[None]).clip(0)
    first: jax.Array = (found // GROUP * GROUP).astype(jnp.int32)
    return first


def _running_sum(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The running sum of g along its last axis, in two steps, and a bound of its rounding error `[..., 1]`."""
    length = g.shape[-1]
    padded = jnp.pad(g.astype(jnp.float32), [(0, 0)] * (g.ndim - 1) + [(0, -length % GROUP)])
    parts = padded.reshape(*g.shape[:-1], -1, GROUP).cumsum(-1)
    ends = parts[..., -1].cumsum(-1)
    ahead = jnp.pad(ends, [(0, 0)] * (g.ndim - 1) + [(1, 0)])[..., :-1]
    total = (parts + ahead[..., None]).reshape(*g.shape[:-1], -1)[..., :length]
    # If g has both signs, a sum may be less than the rounding errors of its terms, so the bound takes absolute values.
    return total, SUM_ERROR * jnp.abs(g.astype(jnp.float32)).sum(-1, keepdims=True)


def _limits(q: jax.Array, own_keys: jax.Array, k: jax.Array, scale: float | None) -> jax.Array:
    """The score of each row's own key minus the bound of all scores of the row: `[..., Hq, Sq]`, float32, at most 0.

    q is `[..., Hq, Sq, D]`, k `[..., Hkv, Skv, D]`, `own_keys` `[..., Hkv, Sq, D]`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    grouped = q.reshape(*q.shape[:-3], k.shape[-3], -1, *q.shape[-2:]).astype(jnp.float32)
    q_norm = jnp.sqrt((grouped * grouped).sum(-1))
    wide = k.astype(jnp.float32)
    k_norm = jnp.sqrt((wide * wide).sum(-1).max(-1))[..., None, None]
    own_score = (grouped * own_keys.astype(jnp.float32)[..., None, :, :]).sum(-1)
    limit = factor * own_score - abs(factor) * (1 + PRODUCT_ERROR) * q_norm * k_norm
    return jnp.where(jnp.isfinite(limit), limit, -jnp.inf).reshape(q.shape[:-1])


def _search(total: jax.Array, limits: jax.Array) -> jax.Array:
    """How many first keys, a multiple of GROUP, may be left out within `limits`. `total`: running sums along keys."""
    whole = total.shape[-1] // GROUP
    if whole == 0:
        return jnp.zeros(limits.shape, jnp.int32)
    parts = -total[..., : whole * GROUP].reshape(*total.shape[:-1], whole, GROUP)
    sums = jax.lax.cumlogsumexp(jax.nn.logsumexp(parts, axis=-1), axis=parts.ndim - 2)
    # NaN leaves out no key, because no comparison with NaN is true.
    return (sums[..., None, :] <= limits[..., None]).sum(-1, dtype=jnp.int32) * GROUP
