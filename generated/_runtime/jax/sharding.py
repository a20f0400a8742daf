# SPDX-License-Identifier: Apache-2.0
"""The partitioning of a primitive whose arrays are sharded: along batch rows and heads, without moving data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..core.checks import fail

_ALIKE = {"b": {"b"}, "h": {"h", "k"}, "k": {"h", "k"}}
_EXPLICIT = {"b": "batch rows", "h": "heads", "k": "heads"}


def explicit_specs(
    op: str, types: Mapping[str, Any], operands: Mapping[str, str], results: Sequence[str]
) -> list[PartitionSpec]:
    """How results are sharded over the axes of type Explicit of a mesh: along batch rows and heads, as the operands.

    `types` are the types of the operands, by name. `operands` and `results` have a letter for each axis, as in
    `partitioned`. Operands may be whole, or sharded along their other axes: XLA then moves data.

    Raises:
        ArgumentError: two operands are sharded over different axes of the mesh.
    """
    found: dict[str, tuple[str, Any]] = {}
    sizes = _sizes(list(operands.values()), [types[name] for name in operands])
    for name, letters in operands.items():
        for letter, size, axes in zip(letters, types[name].shape, types[name].sharding.spec, strict=False):
            what = _EXPLICIT.get(letter)
            if what is None or axes is None or size != sizes.get(letter):
                continue
            first, known = found.setdefault(what, (name, axes))
            # Several devices may share a key head.
            if axes != known and not (letter == "k" and _begins_with(known, axes)):
                fail(op, name, f"{what} sharded over {known!r}, as those of {first}, or whole", f"{axes!r}")
    whole = ("", None)
    return [PartitionSpec(*(found.get(_EXPLICIT.get(letter, ""), whole)[1] for letter in x)) for x in results]


def _sizes(operands: Sequence[str], values: Sequence[Any]) -> dict[str, int]:
    """The number of batch rows, heads and key heads by letter: q and k have all of them, another operand may have one
    for all."""
    found: dict[str, int] = {}
    for letters, value in zip(operands[:2], values, strict=False):
        found |= zip(letters, value.shape, strict=False)
    return found


def _begins_with(axes: Any, first: Any) -> bool:
    """Whether some axes of a mesh begin with others."""
    names = _flat([first])
    return _flat([axes])[: len(names)] == names


def is_sharded(x: jax.Array, axis: int) -> bool:
    """Whether an axis is sharded over an axis of type Explicit of a mesh."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] is not None


def varying_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map: let all arrays vary over every mesh axis that any varies over. Gradients are summed outside."""
    axes = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
    every = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(arrays, axes, strict=True)
    ]


def by_device(
    function: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], arrays: Sequence[jax.Array], mapped: Sequence[bool]
) -> Sequence[jax.Array]:
    """`function` of arrays some of which are `mapped` along axis 0, as all of its results are.

    If that axis is sharded over axes of type Explicit, each device computes the elements that it has.
    """
    axes = [jax.typeof(x).sharding.spec[0] for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped]
    own = next((_flat([axis]) for axis in axes if axis is not None), [])
    if not own:
        return function(arrays)
    mesh = jax.typeof(arrays[0]).sharding.mesh
    specs = [_moved(jax.typeof(x).sharding.spec, own, is_mapped) for x, is_mapped in zip(arrays, mapped, strict=True)]
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    # Axes that shard_map does not name stay Explicit inside.
    leading = PartitionSpec(tuple(own))
    call = jax.shard_map(
        lambda *local: function(varying_alike(local)),
        mesh=mesh,
        in_specs=tuple(leading if is_mapped else PartitionSpec() for is_mapped in mapped),
        out_specs=leading,
        axis_names=set(own),
    )
    found: Sequence[jax.Array] = call(*placed)
    return found


def _moved(spec: PartitionSpec, names: Sequence[str], leads: bool) -> PartitionSpec:
    """A spec in which some axes of a mesh shard the leading axis of an array, or no axis."""
    others = [tuple(name for name in _flat([axes]) if name not in names) if axes is not None else () for axes in spec]
    return PartitionSpec(*([tuple(names), *others[1:]] if leads else others))


def whole_type(aval: Any) -> Any:
    """The type of an array that is not sharded over axes of type Explicit."""
    return aval.update(sharding=NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * aval.ndim)))


def meshless(local: Callable[..., Any]) -> Callable[..., Any]:
    """`local`, the computation of a single device, traced without the mesh of `jax.set_mesh`.

    XLA calls back for what it partitions. From JAX 0.12 on it does so in the thread that compiles, where a mesh may be
    set: arrays that `local` makes would be sharded over its Explicit axes, and collide with arrays of the device.
    """

    def traced(*arrays: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return local(*arrays)

    return traced


def partitioned(
    local: Callable[..., Sequence[jax.Array]],
    of_part: Callable[..., Sequence[jax.Array]],
    operands: Sequence[str],
    results: Sequence[str],
    by_batch: bool,
    by_heads: bool,
) -> Callable[..., Any]:
    """`local` as a function that XLA cuts along batch rows and heads. Devices with a part of these compute `of_part`.

    `operands` and `results` have a letter for each axis: b for batch rows, h for query heads, k for key heads, any
    other letter, or none, for an axis that every device needs whole. The first operand is q, the second k. A result
    without the axis that is cut is a sum over it, such as the gradient of a tensor that all batch rows read.

    If query heads lie on more devices than there are key heads, several devices share a key head: each has a copy, and
    the gradient of the key head is the sum of theirs.
    """

    def call(*arrays: jax.Array) -> Sequence[jax.Array]:
        return local(*arrays)

    def rule(mesh: Any, value_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        names = _Names(_sizes(operands, value_types), math.prod(mesh.shape.values()))
        read = [names.mapping(letters, x.shape) for letters, x in zip(operands, value_types, strict=True)]
        written = [names.mapping(letters, x.shape) for letters, x in zip(results, result_types, strict=True)]
        text = f"{', '.join(read)} -> {', '.join(written)}"
        whole = [name for name in names.order if name not in names.cut(by_batch, by_heads)]
        return text, {**names.sizes, "need_replication_factors": tuple(whole)}

    def cut(mesh: Any, arg_shapes: Sequence[Any], _result_shapes: Any) -> Any:
        if not isinstance(arg_shapes[0].sharding, NamedSharding):
            # Under jax.set_mesh JAX names no axes if no argument of the program is sharded: every device computes all.
            alone = Mesh(np.array(list(arg_shapes[0].sharding.device_set)), ("devices",))
            whole = NamedSharding(alone, PartitionSpec())
            return alone, meshless(local), [whole] * len(results), (whole,) * len(operands)
        sizes, spec = _sizes(operands, arg_shapes), arg_shapes[0].sharding.spec
        batch_axes = spec[operands[0].index("b")] if by_batch and "b" in operands[0] else None
        by_head = head_axes(mesh, spec[operands[0].index("h")] if by_heads else None, sizes["h"], sizes["k"])
        own = {"b": batch_axes, "h": (*by_head.keys, *by_head.shared) or None, "k": by_head.keys or None}
        compute = of_part if any(own.values()) else local

        def sharding(letters: str, shape: Sequence[int]) -> NamedSharding:
            axes = [
                own.get(letter) if size == sizes.get(letter) else None
                for letter, size in zip(letters.ljust(len(shape), "."), shape, strict=True)
            ]
            return NamedSharding(mesh, PartitionSpec(*axes))

        def key_axis(letters: str, shape: Sequence[int]) -> int | None:
            """The axis of key heads of an array that has one for each."""
            axis = letters.find("k")
            return axis if by_head.shared and axis >= 0 and shape[axis] == sizes["k"] else None

        def sharded(*arrays: jax.Array) -> list[jax.Array]:
            shared = [key_axis(letters, arg.shape) for letters, arg in zip(operands, arg_shapes, strict=True)]
            given = [x if axis is None else by_head.taken(x, axis) for x, axis in zip(arrays, shared, strict=True)]
            found = []
            for letters, result, array in zip(results, _result_shapes, compute(*given), strict=True):
                axis = key_axis(letters, result.shape)
                summed = _flat([batch_axes]) if batch_axes is not None and "b" not in letters else []
                if not {"h", "k"} & set(letters):
                    summed += own["h"] or ()
                elif "h" not in letters:
                    summed += by_head.shared
                whole = array if axis is None else by_head.placed(array, axis)
                found.append(jax.lax.psum(whole, tuple(summed)) if summed else whole)
            return found

        outputs = [sharding(*pair) for pair in zip(results, (r.shape for r in _result_shapes), strict=True)]
        inputs = [sharding(letters, arg.shape) for letters, arg in zip(operands, arg_shapes, strict=True)]
        return mesh, meshless(sharded), outputs, tuple(inputs)

    found = custom_partitioning(call)
    found.def_partition(partition=cut, sharding_rule=rule)
    return found


@dataclass(frozen=True)
class HeadAxes:
    """The mesh axes that query heads are cut by.

    Attributes:
        keys: the axes that key heads are cut by, too. shared: the axes along which key heads are whole.
        kv_heads: the number of key heads in an array of a device. sharers: the number of devices along `shared`. Each
            of them has query heads of a single key head.
    """

    keys: tuple[str, ...]
    shared: tuple[str, ...]
    kv_heads: int
    sharers: int

    def taken(self, array: jax.Array, axis: int) -> jax.Array:
        """The part of an array that belongs to the key head of this device's query heads."""
        return jax.lax.dynamic_slice_in_dim(array, self._head(), 1, axis)

    def placed(self, array: jax.Array, axis: int) -> jax.Array:
        """An array with that part, and with zeros for the other key heads."""
        if self.kv_heads == 1:
            return array
        every = jnp.zeros((*array.shape[:axis], self.kv_heads, *array.shape[axis + 1 :]), array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(every, array, self._head(), axis)

    def _head(self) -> jax.Array:
        return jax.lax.axis_index(self.shared) * self.kv_heads // self.sharers


def head_axes(mesh: Any, axes: Any, heads: int, kv_heads: int) -> HeadAxes:
    """The mesh axes to cut heads by. They are the first of `axes`, those that query heads are sharded over: as many as
    leave a device all query heads of its key heads, or query heads of a single key head."""
    names = _flat([axes]) if axes is not None else []

    def devices(names: Sequence[str]) -> int:
        return math.prod(mesh.shape[name] for name in names)

    while heads % devices(names) or (kv_heads % devices(names) and devices(names) % kv_heads):
        names.pop()
    cut = next(n for n in range(len(names), -1, -1) if kv_heads % devices(names[:n]) == 0)
    keys, shared = tuple(names[:cut]), tuple(names[cut:])
    return HeadAxes(keys, shared, kv_heads // devices(keys), devices(shared))


def _flat(axes: Sequence[Any]) -> list[str]:
    return [name for each in axes for name in ((each,) if isinstance(each, str) else each)]


class _Names:
    """The factors of a sharding rule, in order of occurrence.

    They are b for batch rows, k for key heads, g for the query heads of one key head, and h for all query heads.
    """

    def __init__(self, counts: Mapping[str, int], devices: int) -> None:
        """`counts`: the number of batch rows, heads and key heads, by letter. `devices`: those of the mesh."""
        self.counts, self.group = counts, counts["h"] // counts["k"]
        # With more devices than key heads XLA might shard these over a part of a mesh axis, for which a PartitionSpec
        # has no words. So query heads are then a factor of their own.
        self.follow = self.group == 1 or counts["k"] % devices == 0
        self.order: list[str] = []
        self.sizes: dict[str, int] = {}

    def mapping(self, letters: str, shape: Sequence[int]) -> str:
        # A rule may not name a factor twice in one array, as for dims [h, hkv]. Such axes are never cut.
        own = [letter if not {*letters[:i]} & _ALIKE.get(letter, set()) else "." for i, letter in enumerate(letters)]
        letters = "".join(own).ljust(len(shape), ".")
        return " ".join(self._axis(letter, size) for letter, size in zip(letters, shape, strict=True))

    def _axis(self, letter: str, size: int) -> str:
        if letter not in _EXPLICIT or size != self.counts.get(letter):
            return self._factor(f"x{len(self.order)}")
        if letter != "h":
            return self._factor(letter)
        if not self.follow:
            return self._factor("h")
        if self.group == 1:
            return self._factor("k")
        # Key heads are an axis of k, so their number is known. The group is no axis: the rule must give its size.
        self.sizes = {"g": self.group}
        return f"({self._factor('k')} {self._factor('g')})"

    def _factor(self, name: str) -> str:
        if name not in self.order:
            self.order.append(name)
        return name

    def cut(self, by_batch: bool, by_heads: bool) -> set[str]:
        """The factors that arrays may be sharded by."""
        return ({"b"} if by_batch else set()) | ({"h", "k"} if by_heads else set())
