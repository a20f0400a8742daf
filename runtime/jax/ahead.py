"""Rows ahead of a chunk of rows, whose number only a device knows."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .primitive import varying_alike


@dataclass(frozen=True)
class Ahead:
    """Rows that stand ahead of a chunk, so that a call begins where a block of dropout's random words does.

    Attributes:
        count: how many, which depends on the device. room: a call has so many rows more than the chunk.
    """

    count: jax.Array | int
    room: int

    @classmethod
    def of(cls, counts: Sequence[int], rank: jax.Array, room: int) -> "Ahead":
        """Those of one rank, of the counts of all ranks."""
        return cls(jnp.asarray(counts, jnp.int32)[rank], room) if any(counts) else cls(0, 0)

    def widened(self, x: jax.Array, axis: int, value: float = 0.0) -> jax.Array:
        """A chunk with a value in the other rows."""
        if not self.room:
            return x
        room = jnp.full([n + self.room if i == axis else n for i, n in enumerate(x.shape)], value, x.dtype)
        x, room = varying_alike((x, room))
        return jax.lax.dynamic_update_slice_in_dim(room, x, self.count, axis)

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The rows of the chunk."""
        if not self.room:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.count, x.shape[axis] - self.room, axis)
