# SPDX-License-Identifier: Apache-2.0
"""Rows inserted ahead of a chunk of rows. Their number differs by device, so it is an array at run time."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .sharding import varying_alike


@dataclass(frozen=True)
class Ahead:
    """Rows inserted ahead of a chunk, so that a call begins where a block of dropout's random words begins.

    Attributes:
        count: the number of inserted rows, which depends on the device.
        room: a call has this many rows more than the chunk, on every device.
    """

    count: jax.Array | int
    room: int

    @classmethod
    def of(cls, counts: Sequence[int], rank: jax.Array, room: int) -> "Ahead":
        """The rows ahead on one rank. `counts` has the number of rows for each rank."""
        return cls(jnp.asarray(counts, jnp.int32)[rank], room) if any(counts) else cls(0, 0)

    def widened(self, x: jax.Array, axis: int, value: float = 0.0) -> jax.Array:
        """The chunk `x` with `room` more rows along `axis`. All rows outside the chunk hold `value`."""
        if not self.room:
            return x
        room = jnp.full([n + self.room if i == axis else n for i, n in enumerate(x.shape)], value, x.dtype)
        x, room = varying_alike((x, room))
        return jax.lax.dynamic_update_slice_in_dim(room, x, self.count, axis)

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of `widened`: the rows of the chunk alone."""
        if not self.room:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.count, x.shape[axis] - self.room, axis)
