"""Keys that the rows of each device may attend to, sent from device to device by `ppermute`."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.key_needs import routes
from ..core.shards import KeyNeeds, Layout
from ..core.work import Array
from .wide_keys import widened

Shift = tuple[list[tuple[int, int]], Array, Array]
"""Pairs (from, to) of devices; for each device the rows that it sends, of its own, and the rows of the sequence that it
receives, `[ranks, n]`. Rows beyond those of a pair have the number that follows the last row."""


@lru_cache(maxsize=64)
def _shifts(layout: Layout, needs: KeyNeeds) -> list[Shift]:
    """What is sent to the next device, to the one behind it, and so on, where anything is."""
    ranks, found = layout.ranks, []
    of_ranks = [routes(layout, needs, rank) for rank in range(ranks)]
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
    """The rows of the sequence that this device has, `[local]`; padding has the number that follows the last row."""
    order = np.minimum(layout.order, layout.seq).reshape(layout.ranks, -1)
    return jnp.asarray(order, jnp.int32)[jax.lax.axis_index(name)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
def needed_rows(
    layout: Layout, needs: KeyNeeds, name: str, axis: int, uses: int, wire: Any, x: jax.Array
) -> Sequence[jax.Array]:
    """Keys or values in order, once for each use: `axis` has `seq` rows, 0 where this device needs none of them.

    They are sent in the dtype `wire`, and `widened`. Their gradients are added up in float32 and sent back.
    """
    x = x.astype(wire)
    at, rows = jax.lax.axis_index(name), jnp.moveaxis(x, axis, 0)
    whole = jnp.zeros((layout.seq, *rows.shape[1:]), x.dtype).at[_own(layout, name)].set(rows, mode="drop")
    for pairs, send, receive in _shifts(layout, needs):
        part = jnp.take(rows, jnp.asarray(send)[at], axis=0, mode="clip")
        got = jax.lax.ppermute(part, name, pairs)
        whole = whole.at[jnp.asarray(receive)[at]].set(got, mode="drop")
    return (widened(jnp.moveaxis(whole, 0, axis)),) * uses


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
    total = jnp.moveaxis(total, axis, 0)
    found = jnp.take(total, _own(layout, name), axis=0, mode="fill", fill_value=0)
    for pairs, send, receive in _shifts(layout, needs):
        part = jnp.take(total, jnp.asarray(receive)[at], axis=0, mode="fill", fill_value=0)
        got = jax.lax.ppermute(part, name, [(j, i) for i, j in pairs])
        found = found.at[jnp.asarray(send)[at]].add(got, mode="drop")
    return (jnp.moveaxis(found, 0, axis).astype(like.dtype),)


needed_rows.defvjp(_forward, _backward)
