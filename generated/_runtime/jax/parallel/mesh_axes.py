# SPDX-License-Identifier: Apache-2.0
"""Arrays on a mesh whose axes are of the type Explicit: their shardings are parts of their types."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def names_of(axes: Any) -> tuple[str, ...]:
    """The names of no axis, one axis or several axes."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def evenly(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`x`, with its rows whole if the devices of their Explicit mesh axes could not share `size` rows evenly."""
    sharding = _with_rows(x, axis, size)
    return x if sharding in (None, jax.typeof(x).sharding) else jax.sharding.reshard(x, sharding)


def taken(x: jax.Array, rows: Any, axis: int) -> jax.Array:
    """These rows of `x`. They stay cut along Explicit mesh axes if the devices can share them evenly."""
    numbers, sharding = jnp.asarray(rows), _with_rows(x, axis, len(rows))
    # JAX 0.12 differentiates a gather from an array that is cut along any axis only if its sharding is given.
    if sharding is None:
        return jnp.take(x, numbers, axis, unique_indices=True, mode="clip")
    at = (*[slice(None)] * axis, numbers)
    return x.at[at].get(unique_indices=True, mode="clip", out_sharding=sharding)


def _with_rows(x: jax.Array, axis: int, size: int) -> NamedSharding | None:
    """The sharding of `x` with `size` rows along `axis`; None if no Explicit mesh axis cuts `x`."""
    sharding = jax.typeof(x).sharding
    spec = (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
    if all(each is None for each in spec):
        return None
    even = size % prod(sharding.mesh.shape[name] for name in names_of(spec[axis])) == 0
    own = [each if i != axis or even else None for i, each in enumerate(spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*own))


def is_passed(x: Any) -> bool:
    """Whether an array `[]` must be an argument of shard_map, which closes over none on a mesh with Explicit axes."""
    return isinstance(x, jax.core.Tracer) or (
        isinstance(x, jax.Array) and any(jax.typeof(x).sharding.mesh.explicit_axes)
    )


def resharded(mesh: Any, arrays: Iterable[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
    """Arrays cut by the Explicit axes of these specs: shard_map cuts by the other axes itself."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in types.values():
        return list(arrays)

    def explicit(cut: Any) -> tuple[str, ...] | None:
        return tuple(name for name in names_of(cut) if types[name] == AxisType.Explicit) or None

    own = [NamedSharding(mesh, PartitionSpec(*map(explicit, spec))) for spec in specs]
    return [jax.sharding.reshard(x, sharding) for x, sharding in zip(arrays, own, strict=True)]
