# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a variant's own tensors from the sums that kernels return."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.distances import lag_axis
from .tensor import Tensor


def scalar_array(x: float | Tensor) -> jax.Array:
    """A scalar of the call as an array."""
    return x.value() if isinstance(x, Tensor) else jnp.asarray(x)


def reduce_gradient(total: jax.Array, axes: str, num_kv_heads: int, length: int = 0) -> jax.Array:
    """Sum `[B, Hq]` or `[B, Hq, Skv]` down to a tensor's axes, in its order: `b`, `h`, `k` (key heads), `s` (keys).

    The tensor's axis of keys has `length` elements. The gradient of elements beyond the last key is 0.
    """
    if length > total.shape[-1]:
        total = jnp.pad(total, [(0, 0)] * (total.ndim - 1) + [(0, length - total.shape[-1])])
    have = "bh" if total.ndim == 2 else "bhs"
    if "k" in axes:
        total = total.reshape(total.shape[0], num_kv_heads, -1, *total.shape[2:]).sum(2)
        have = have.replace("h", "k")
    dropped = tuple(i for i, axis in enumerate(have) if axis not in axes)
    total = total.sum(dropped)
    have = "".join(axis for axis in have if axis in axes)
    return total.transpose([have.index(axis) for axis in axes])


def lag_grid(
    q: Any, k: Any, row_offset: int, row_offsets: Any, near_first: int | None, near_last: int | None
) -> jax.Array:
    """The distance of each sum of a dense call, `[B or 1, 1, n]`.

    The first and the last distance stand for all far blocks on that side.
    """
    axis = lag_axis(q.shape[2], k.shape[2], row_offset if row_offsets is None else None, near_first, near_last)
    lags = jnp.arange(-1, axis.size + 1).reshape(1, 1, -1) - axis.origin
    return lags + (row_offset if row_offsets is None else row_offsets.reshape(-1, 1, 1))


def lag_sums(pieces: jax.Array, far: jax.Array) -> jax.Array:
    """The sums of ds by distance: the sums of the near blocks, between those of the far blocks on either side."""
    ends = far.sum(-1)
    return jnp.concatenate((ends[:, :, :1], pieces.sum(2), ends[:, :, 1:]), axis=2)


def place_sums(sums: jax.Array, shape: Sequence[int], places: Sequence[Any]) -> jax.Array:
    """Add sums `[B, Hq, S]` to elements of a tensor, in a fixed order. `places` has an index for each of its axes."""
    index = jnp.broadcast_arrays(*(jnp.asarray(i) for i in places))
    # Sums along an axis that no index depends on belong to one element, and are added up here.
    like = (1,) * (sums.ndim - index[0].ndim) + index[0].shape
    dropped = tuple(axis for axis, size in enumerate(like) if size == 1 < sums.shape[axis])
    flat = jnp.ravel_multi_index(tuple(index), tuple(shape), mode="clip").reshape(-1)
    return sums_at(sums.sum(dropped, keepdims=True).reshape(-1), flat, math.prod(shape)).reshape(shape)


def sums_at(values: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Add up the values `[n, ...]` that have the same index `[n]`: `[size, ...]`.

    Scattered additions are atomic on a GPU, so their order varies. Sorting and scanning keeps the order fixed.
    """
    if values.shape[0] == 0:
        return jnp.zeros((size, *values.shape[1:]), values.dtype)
    order = jnp.argsort(index, stable=True)
    index = index[order]
    running = running_sums(values[order], index)
    last = jnp.searchsorted(index, jnp.arange(size), side="right") - 1
    found = (last >= 0) & (index[last] == jnp.arange(size))
    return jnp.where(found.reshape(-1, *[1] * (values.ndim - 1)), running[last], 0)


def running_sums(values: jax.Array, of: jax.Array) -> jax.Array:
    """Cumulative sums of values `[n, ...]` that restart where `of` `[n]` changes."""
    begins = jnp.concatenate([jnp.ones(1, bool), of[1:] != of[:-1]])
    begins = jnp.broadcast_to(begins.reshape(-1, *[1] * (values.ndim - 1)), values.shape)

    def joined(left: Any, right: Any) -> Any:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, running = jax.lax.associative_scan(joined, (begins, values))
    found: jax.Array = running
    return found


def sequence_of_rows(cu_seqlens: Tensor | jax.Array, total: int) -> jax.Array:
    """The sequence of each of `total` packed rows."""
    return jnp.searchsorted(cu_seqlens[1:], jnp.arange(total, dtype=jnp.int32), side="right")


def packed_row(
    index: Any, cu_seqlens: Tensor | jax.Array, seqs: jax.Array, q_offset: int | Tensor | jax.Array | None = None
) -> jax.Array:
    """The packed row where the kernels read element `index` of each sequence of `seqs`.

    For an axis of queries `index` is a position, and `q_offset` is what positions are ahead of row numbers. A sequence
    without tokens reads row 0 of all: that row exists, and nothing is added to it.
    """
    start, end = cu_seqlens[seqs], cu_seqlens[seqs + 1]
    if q_offset is not None:
        index = jnp.maximum(index, 0) - (q_offset if isinstance(q_offset, int) else q_offset[seqs])
    row = start + jnp.minimum(jnp.maximum(index, 0), end - start - 1)
    return jnp.where(start < end, row, 0)


def sums_by_sequence(sums: jax.Array, block_seqs: Tensor, num_seqs: int) -> jax.Array:
    """The sums `[1, Hq, entries]` of packed blocks, added up by sequence in a fixed order: `[n, Hq]`.

    Each block may have several entries, side by side. The sums of blocks without a sequence are zero.
    """
    num_blocks = block_seqs.shape[0]
    sums = sums.reshape(*sums.shape[:2], num_blocks, sums.shape[2] // max(num_blocks, 1)).sum(3)
    return sums_at(sums[0].T, jnp.maximum(block_seqs[:, 0], 0), num_seqs)


def place_pairs(pairs: jax.Array, shape: Sequence[int], axes: str, q_offset: int | Tensor) -> jax.Array:
    """`[B, Hq, Sq, Skv]` as the gradient of a tensor with axes `bhqs` in some order, queries at their positions."""
    batch, rows, keys = (axes.index(axis) for axis in "bqs")
    pairs = pairs.transpose(["bhqs".index(axis) for axis in axes])
    if isinstance(q_offset, int) and q_offset == 0 and pairs.shape == tuple(shape):
        return pairs
    shift = q_offset[:] if isinstance(q_offset, Tensor) else jnp.full(shape[batch], q_offset)
    room = [(0, 0)] * pairs.ndim
    room[keys] = (0, shape[keys] - pairs.shape[keys])
    order = [batch, rows, *(axis for axis in range(pairs.ndim) if axis not in (batch, rows))]
    of_row = jax.vmap(lambda own, by: _at_positions(own, by, shape[rows]))(jnp.pad(pairs, room).transpose(order), shift)
    return of_row.transpose([order.index(axis) for axis in range(pairs.ndim)])


def _at_positions(rows: jax.Array, shift: jax.Array, size: int) -> jax.Array:
    """Rows `[Sq, ...]` moved by `shift` along an axis of `size`. Rows beyond an end are added to that end."""
    position = jnp.arange(rows.shape[0]) + shift
    wide = [1] * (rows.ndim - 1)
    before = jnp.where((position < 0).reshape(-1, *wide), rows, 0).sum(0)
    behind = jnp.where((position >= size).reshape(-1, *wide), rows, 0).sum(0)
    row = jnp.arange(size) - shift
    inside = ((row >= 0) & (row < rows.shape[0])).reshape(-1, *wide)
    placed = jnp.where(inside, rows[jnp.clip(row, 0, rows.shape[0] - 1)], 0)
    return placed.at[0].add(before).at[size - 1].add(behind)
