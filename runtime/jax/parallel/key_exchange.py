"""Sends each device, by `ppermute`, the keys that its rows may attend to."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.parallel.key_routes import routes
from ...core.parallel.shards import KeyNeeds, Layout
from ...core.parallel.work import Array
from .wide_keys import widened

Shift = tuple[list[tuple[int, int]], Array, Array]
"""One `ppermute`: its pairs (from, to) of devices, then two tables `[ranks, n]`. The first has the rows that each
device sends, numbered among its own rows. The second has the rows that it receives, numbered in the sequence. A device
with fewer than n rows has the number that follows the last row in the remaining elements."""


@lru_cache(maxsize=64)
def _shifts(layout: Layout, needs: KeyNeeds) -> list[Shift]:
    """A shift for each distance between devices, from 1 on, at which any device sends rows."""
    ranks, found = layout.ranks, []
    of_ranks = routes(layout, needs)
    for distance in range(1, ranks):
        pairs = [(i, (i + distance) % ranks) for i in range(ranks)]
        pairs = [(i, j) for i, j in pairs if len(of_ranks[i].send[j])]
        most = max((len(of_ranks[i].send[j]) for i, j in pairs), default=0)
        if most == 0:
            continue
        send, receive = np.full((ranks, most), layout.local), np.full((ranks, most), layout.seq)
        for i, j in pairs:
            rows = of_ranks[i].send[j]
            send[i, : len(rows)], receive[j, : len(rows)] = rows, of_ranks[j].receive[i]
        found.append((pairs, send.astype(np.int32), receive.astype(np.int32)))
    return found


def _own(layout: Layout, name: str) -> jax.Array:
    """The rows of the sequence on this device, `[local]`. Padding has the number that follows the last row."""
    order = np.minimum(layout.order, layout.seq).reshape(layout.ranks, -1)
    return jnp.asarray(order, jnp.int32)[jax.lax.axis_index(name)]


def _taken(x: jax.Array, numbers: jax.Array, axis: int) -> jax.Array:
    """The rows of `x` along `axis` with these numbers; 0 for a number behind the last row."""
    return jnp.take(x, numbers, axis, mode="fill", fill_value=0)


def _inverse(numbers: jax.Array, size: int) -> jax.Array:
    """Where each number from 0 to `size` - 1 is among `numbers`, int32 `[size]`; the largest integer if it is not.

    No number below `size` may occur twice. Larger ones are ignored.
    """
    nowhere = jnp.full((size,), np.iinfo(np.int32).max, jnp.int32)
    return nowhere.at[numbers].set(jnp.arange(numbers.size, dtype=jnp.int32), mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
def needed_rows(
    layout: Layout, needs: KeyNeeds, name: str, axis: int, uses: int, wire: Any, x: jax.Array
) -> Sequence[jax.Array]:
    """Keys or values in the order of the sequence, one array for each use. Rows that this device does not need are 0.

    `axis` has `seq` rows. Rows are sent in the dtype `wire`, then `widened`. The gradients of all uses are added up in
    float32 and sent back.
    """
    x = x.astype(wire)
    at, parts, numbers = jax.lax.axis_index(name), [x], [_own(layout, name)]
    for pairs, send, receive in _shifts(layout, needs):
        parts.append(jax.lax.ppermute(_taken(x, jnp.asarray(send)[at], axis), name, pairs))
        numbers.append(jnp.asarray(receive)[at])
    # XLA takes longer to scatter rows than to scatter their indices and then to gather the rows.
    sources = _inverse(jnp.concatenate(numbers), layout.seq)
    return (widened(_taken(jnp.concatenate(parts, axis), sources, axis)),) * uses


def _forward(layout: Layout, needs: KeyNeeds, name: str, axis: int, uses: int, wire: Any, x: jax.Array) -> Any:
    return needed_rows(layout, needs, name, axis, uses, wire, x), jnp.zeros((), x.dtype)


def _backward(
    layout: Layout,
    needs: KeyNeeds,
    name: str,
    axis: int,
    _uses: int,
    _wire: Any,
    like: jax.Array,
    given: Sequence[jax.Array],
) -> Any:
    at, total = jax.lax.axis_index(name), given[0].astype(jnp.float32)
    for x in given[1:]:
        total = total + x
    found = _taken(total, _own(layout, name), axis)
    for pairs, send, receive in _shifts(layout, needs):
        part = _taken(total, jnp.asarray(receive)[at], axis)
        got = jax.lax.ppermute(part, name, [(j, i) for i, j in pairs])
        found = found + _taken(got, _inverse(jnp.asarray(send)[at], layout.local), axis)
    return (found.astype(like.dtype),)


needed_rows.defvjp(_forward, _backward)
