# SPDX-License-Identifier: Apache-2.0
"""The partitioning of a primitive whose arrays are sharded: along batch rows and heads, without moving data."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    # q has all batch rows and heads, k all key heads. Another operand may have one for all.
    sizes: dict[str, int] = {}
    for name in list(operands)[:2]:
        sizes |= zip(operands[name], types[name].shape, strict=False)
    for name, letters in operands.items():
        for letter, size, axes in zip(letters, types[name].shape, types[name].sharding.spec, strict=False):
            what = _EXPLICIT.get(letter)
            if what is None or axes is None or size != sizes.get(letter):
                continue
            first, known = found.setdefault(what, (name, axes))
            if axes != known:
                fail(op, name, f"{what} sharded over {known!r}, as those of {first}, or whole", f"{axes!r}")
    whole = ("", None)
    return [PartitionSpec(*(found.get(_EXPLICIT.get(letter, ""), whole)[1] for letter in x)) for x in results]


def is_sharded(x: jax.Array, axis: int) -> bool:
    """Whether an axis is sharded over an axis of type Explicit of a mesh."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] is not None


def partitioned(
    local: Callable[..., Sequence[jax.Array]],
    operands: Sequence[str],
    results: Sequence[str],
    by_batch: bool,
    by_heads: bool,
) -> Callable[..., Any]:
    """`local` as a function that XLA cuts along batch rows and heads.

    `operands` and `results` have a letter for each axis: b for batch rows, h for query heads, k for key heads, any
    other letter, or none, for an axis that every device needs whole. The first operand is q, the second k. A result
    without the axis that is cut is a sum over it, such as the gradient of a tensor that all batch rows read.
    """

    def call(*arrays: jax.Array) -> Sequence[jax.Array]:
        return local(*arrays)

    def rule(_mesh: Any, value_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        shapes = [tuple(value.shape) for value in value_types]
        q, k = shapes[0], shapes[1]
        heads, kv_heads = q[operands[0].index("h")], k[operands[1].index("k")]
        batch = q[operands[0].index("b")] if "b" in operands[0] else 1
        names = _Names(batch, heads, kv_heads)
        read = [names.mapping(*pair) for pair in zip(operands, shapes, strict=True)]
        written = [names.mapping(*pair) for pair in zip(results, (tuple(r.shape) for r in result_types), strict=True)]
        text = f"{', '.join(read)} -> {', '.join(written)}"
        whole = [name for name in names.order if name not in names.cut(by_batch, by_heads)]
        return text, {**names.sizes, "need_replication_factors": tuple(whole)}

    def cut(mesh: Any, arg_shapes: Sequence[Any], _result_shapes: Any) -> Any:
        if not isinstance(arg_shapes[0].sharding, NamedSharding):
            # Under jax.set_mesh JAX names no axes if no argument of the program is sharded: every device computes all.
            alone = Mesh(np.array(list(arg_shapes[0].sharding.device_set)), ("devices",))
            whole = NamedSharding(alone, PartitionSpec())
            return alone, local, [whole] * len(results), (whole,) * len(operands)
        heads = arg_shapes[0].shape[operands[0].index("h")]
        kv_heads = arg_shapes[1].shape[operands[1].index("k")]
        spec = arg_shapes[0].sharding.spec
        batch_axes = spec[operands[0].index("b")] if by_batch and "b" in operands[0] else None
        head_axes = _dividing(spec[operands[0].index("h")], mesh, kv_heads) if by_heads else None
        batch = arg_shapes[0].shape[operands[0].index("b")] if "b" in operands[0] else 1
        own = {"b": batch_axes, "h": head_axes, "k": head_axes if kv_heads > 1 or heads == 1 else None}
        sizes = {"b": batch, "h": heads, "k": kv_heads}

        def sharding(letters: str, shape: Sequence[int]) -> NamedSharding:
            axes = [
                own.get(letter) if size == sizes.get(letter) else None
                for letter, size in zip(letters.ljust(len(shape), "."), shape, strict=True)
            ]
            return NamedSharding(mesh, PartitionSpec(*axes))

        def sharded(*arrays: jax.Array) -> list[jax.Array]:
            found = []
            for letters, array in zip(results, local(*arrays), strict=True):
                summed = [
                    axes
                    for cut_by, axes in (("b", batch_axes), ("h" if own["k"] is None else "hk", head_axes))
                    if axes is not None and not set(cut_by) & set(letters)
                ]
                found.append(jax.lax.psum(array, tuple(_flat(summed))) if summed else array)
            return found

        outputs = [sharding(*pair) for pair in zip(results, (r.shape for r in _result_shapes), strict=True)]
        inputs = [sharding(letters, arg.shape) for letters, arg in zip(operands, arg_shapes, strict=True)]
        return mesh, sharded, outputs, tuple(inputs)

    found = custom_partitioning(call)
    found.def_partition(partition=cut, sharding_rule=rule)
    return found


def _dividing(axes: Any, mesh: Any, kv_heads: int) -> Any:
    """The first of the mesh axes that heads are sharded over, as many as cut key heads evenly: all for one key head."""
    names = _flat([axes]) if axes is not None else []
    while kv_heads > 1 and kv_heads % math.prod(mesh.shape[name] for name in names):
        names.pop()
    return tuple(names) or None


def _flat(axes: Sequence[Any]) -> list[str]:
    return [name for each in axes for name in ((each,) if isinstance(each, str) else each)]


class _Names:
    """The factors of a sharding rule, in order of occurrence: b, k and g for batch rows, key heads and their groups."""

    def __init__(self, batch: int, heads: int, kv_heads: int) -> None:
        self.batch, self.kv_heads, self.group = batch, kv_heads, heads // kv_heads
        self.order: list[str] = []
        self.sizes: dict[str, int] = {}

    def mapping(self, letters: str, shape: Sequence[int]) -> str:
        # A rule may not name a factor twice in one array, as for dims [h, hkv]. Such axes are never cut.
        own = [letter if not {*letters[:i]} & _ALIKE.get(letter, set()) else "." for i, letter in enumerate(letters)]
        letters = "".join(own).ljust(len(shape), ".")
        return " ".join(self._axis(letter, size) for letter, size in zip(letters, shape, strict=True))

    def _axis(self, letter: str, size: int) -> str:
        if letter == "b" and size == self.batch:
            return self._factor("b")
        if letter == "k" and size == self.kv_heads:
            return self._factor("k")
        if letter == "h" and size == self.kv_heads * self.group:
            if self.group == 1 or self.kv_heads == 1:
                return self._factor("k" if self.group == 1 else "g")
            # Key heads are an axis of k, so their number is known. The group is no axis: the rule must give its size.
            self.sizes = {"g": self.group}
            return f"({self._factor('k')} {self._factor('g')})"
        return self._factor(f"x{len(self.order)}")

    def _factor(self, name: str) -> str:
        if name not in self.order:
            self.order.append(name)
        return name

    def cut(self, by_batch: bool, by_heads: bool) -> set[str]:
        """The factors that arrays may be sharded by: the group of heads only if there is a single key head."""
        heads = {"g"} if self.kv_heads == 1 < self.group else {"k"}
        return ({"b"} if by_batch else set()) | (heads if by_heads else set())
