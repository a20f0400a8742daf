# SPDX-License-Identifier: Apache-2.0
"""Attention over several devices in JAX: each has some rows of a long sequence, and every variant stays exact.

>>> from generated.jax import causal
>>> layout = plan(causal, 2, seq=4096, heads=(8, 2), head_dim=64, strategy="gather")
>>> layout.chunks
(((0, 1024), (3072, 1024)), ((1024, 1024), (2048, 1024)))

Rows of a whole array are put in the order of the devices before the array is cut along the axis of the mesh:

    layout = plan(causal, mesh.shape["cp"], seq=131072, heads=(32, 8), head_dim=128)
    tokens, positions = layout.shard(tokens, dim=1), layout.shard(layout.positions)
    o = context_parallel(causal, layout, mesh=mesh, spec=P("dp", "cp", "tp"))(q, k, v)     # in jit
    o = context_parallel(causal, layout, axis="cp")(q, k, v)                              # in your own shard_map
    logits = layout.unshard(logits, dim=1)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ._runtime.core.checks import PACKED, fail
from ._runtime.core.parallel import shards
from ._runtime.core.parallel.calls import TOKENS, check_call, check_cuts, form_of, head_axis, own_dims, row_axis
from ._runtime.core.parallel.costs import Machine
from ._runtime.core.parallel.plan_requests import checked_request
from ._runtime.core.parallel.shard_plans import make_layout
from ._runtime.core.parallel.work import work_of
from ._runtime.jax.parallel.context_parallel import LAYOUT, local_call
from ._runtime.jax.parallel.mesh_axes import evenly, is_passed, names_of, resharded, taken
from ._runtime.jax.support import check_flag

__all__ = ["Layout", "Machine", "context_parallel", "plan"]


class Layout(shards.Layout):
    """A layout among devices: it puts rows of arrays in the order of the devices and back. Make it with `plan(...)`."""

    @property
    def positions(self) -> jax.Array:
        """The position of each row in its sequence, int32 `[seq]`."""
        return jnp.asarray(self.row_positions, jnp.int32)

    def shard(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """A whole array with its rows along `dim` in the order of the devices, padded with 0, to be cut evenly."""
        axis = shards.axis_of(x, dim, self.seq, "shard")
        if self._keeps_rows:
            return jnp.asarray(x)
        widths = [(0, self.padded - self.seq) if i == axis else (0, 0) for i in range(x.ndim)]
        return taken(jnp.pad(evenly(jnp.asarray(x), axis, self.padded), widths), self.order, axis)

    def unshard(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """The inverse of `shard`: rows in the order of the sequence, without padding."""
        axis = shards.axis_of(x, dim, self.padded, "unshard")
        return jnp.asarray(x) if self._keeps_rows else taken(jnp.asarray(x), self.places, axis)

    @property
    def _keeps_rows(self) -> bool:
        """Whether the devices have the rows in the order of the sequence, without padding."""
        return self.in_order and self.padded == self.seq


def plan(
    op: Any,
    mesh: Any,
    *,
    seq: int,
    heads: tuple[int, int],
    head_dim: int,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    masks: Sequence[tuple[Any, Mapping[str, Any]]] | None = None,
    strategy: str = "auto",
    balance: str = "work",
    machine: Machine | None = None,
    **own: Any,
) -> Layout:
    """Plan which rows each device has, and how devices compute together: on the host, before anything is traced.

    A layout is hashable, so that it may be a static argument of `jax.jit`.

    Args:
        op: the op whose work is distributed, such as `generated.jax.causal`.
        mesh: the number of devices along the axis, `mesh.shape["cp"]`, or a mesh with one axis. For nodes and the
            devices of a node: a pair of numbers or a mesh with two axes.
        seq: rows of the whole sequence; any number.
        heads: query heads and key heads of a device.
        head_dim: size of a head.
        cu_seqlens: integers `[n + 1]`: packed sequences, whose calls take q `[rows, Hq, D]`.
        segment_ids: integers `[S]` or `[B, S]`: documents in rows of a batch. No row attends to another document.
        masks: several `(op, its arguments)` that share this layout, instead of `own`.
        strategy: "heads", "gather", "exchange", "ring", or "auto". "auto" takes the fastest by the cost model, or
            "heads" if that takes at most 5 % more time. If the keys of all rows do not fit into the memory of
            `machine`, it takes "heads" or "ring" if it can. `layout.reasons` says why.
            A mesh with two axes has the strategy "2d": heads are split inside nodes, and keys are gathered or exchanged
            among nodes.
            "exchange" sends only keys that the masks of the plan may attend to. A call of another op, with other
            arguments, with positions, or of a mask that reads arrays gathers all keys.
        balance: "work" distributes rows by the blocks that the masks visit, "zigzag" by row numbers alone, and
            "contiguous" gives each device one run of rows.
        machine: rates for the cost model.
        own: the arguments that the mask of `op` reads, such as `size=1024`: numbers, and arrays with known values.
            One that has the name of an argument of `plan` is given in `masks=`.

    Raises:
        ArgumentError: a bad argument.
    """
    ranks = mesh
    if isinstance(mesh, (Mesh, AbstractMesh)):
        if len(mesh.axis_names) > 2:
            expected = 'a mesh of one axis or two, or a number such as mesh.shape["cp"]'
            fail("plan", "mesh", expected, f"{dict(mesh.shape)}")
        ranks = mesh.size if len(mesh.axis_names) == 1 else tuple(mesh.shape.values())
    if masks is not None and own:
        fail("plan", next(iter(own)), "arguments inside masks= where that is given", "one beside it")
    asked = checked_request(
        op,
        ranks,
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        masks=masks,
        strategy=strategy,
        balance=balance,
        head_groups=1,  # XLA orders collectives beside kernels by itself
        machine=machine,
        own=own,
    )
    layout = make_layout(asked)
    return Layout(**{each.name: getattr(layout, each.name) for each in fields(shards.Layout)})


def context_parallel(
    op: Callable[..., Any],
    layout: Layout,
    *,
    axis: str | tuple[str, str] = "cp",
    mesh: Any = None,
    spec: Any = None,
) -> Callable[..., Any]:
    """`op` over the rows of all devices of a mesh axis: `context_parallel(op, layout)(q, k, v, ...)`.

    Without a mesh, call the result inside `jax.shard_map`, on each device's rows: q, k and v, o and lse, token ids and
    positions. The variant's own tensors are whole on every device. A tensor with an axis of rows may also have the
    device's rows alone, as a log-decay `g` usually does.

    With a mesh, the result calls `shard_map` itself: arrays are whole. q, k and v, token ids, positions and a log-decay
    are in the order of `layout.shard`, and so are o and lse; the variant's other tensors are in the order of the
    sequence. Keywords are those of the op, without `q_offset`, `cu_seqlens_q` and `schedule`. A `seed` of dropout is
    the same on every device. The devices together drop the probabilities that one device would drop.

    Args:
        op: the op, such as `generated.jax.causal`. It may be another one than that of the plan.
        layout: what `plan` returned.
        axis: the axis of the mesh that rows are cut along; under "2d" the axis of nodes and that of a node's devices.
        mesh: of the devices; its axes are of the type Auto or Explicit. Arrays that are cut in another way along
            Explicit axes are resharded first, and o is sharded as `spec` says.
        spec: how q, k and v are cut: axes of the mesh for batch rows, rows and heads, `P("dp", "cp", "tp")`, in this
            order whatever the layout of the call; for packed rows those for rows and heads, `P("cp", "tp")`.

    Raises:
        ArgumentError: a bad argument.
    """
    if not isinstance(layout, Layout):
        fail("context_parallel", "layout", "what plan(...) returns", type(layout).__name__)
    work = work_of(op, "context_parallel")
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        fail("context_parallel", "mesh", "a jax.sharding.Mesh or None", repr(mesh))
    if spec is not None and not isinstance(spec, (PartitionSpec, tuple)):
        fail("context_parallel", "spec", "a PartitionSpec or None", repr(spec))
    cuts = [name for cut in spec or () for name in names_of(cut)]
    if len(set(cuts)) < len(cuts):
        fail("context_parallel", "spec", "each axis of the mesh once", spec)
    known = list(inspect.signature(op).parameters)

    def on_device(**given: Any) -> Any:
        try:
            size = jax.lax.axis_size(axis)
        except NameError:
            fail("context_parallel", "mesh", f"a mesh, or a call inside jax.shard_map over the axis {axis!r}", mesh)
        _check_ranks(work.op, layout, axis, size)
        pair = isinstance(axis, tuple) and len(axis) == 2
        if pair != (layout.nodes is not None) or (pair and jax.lax.axis_size(axis[1]) != layout.inner):
            expected = (
                f"one planned for the axes {axis!r}: a pair, of nodes and of the devices of a node, has strategy='2d'"
            )
            fail(work.op, "layout", expected, f"{layout.strategy!r} with nodes of {layout.inner} devices")
        check_call(work, layout, known, given, LAYOUT)
        for name in ("k", "v"):
            if given[name].dtype != given["q"].dtype:
                fail(work.op, name, f"dtype {given['q'].dtype}, that of q", given[name].dtype)
        return local_call(op, work, layout, axis, given)

    def call(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        wants_lse = check_flag(work.op, "return_lse", keywords.get("return_lse", False))
        given = {"q": q, "k": k, "v": v, **keywords, "return_lse": wants_lse}
        for name in ("q", "k", "v", *work.tensors):
            if given.get(name) is not None and not hasattr(given[name], "ndim"):
                fail(work.op, name, "a jax.Array", type(given[name]).__name__)
        if mesh is None:
            return on_device(**given)
        arrays = {name: x for name, x in given.items() if getattr(x, "shape", ()) or is_passed(x)}
        rest = {name: x for name, x in given.items() if name not in arrays}
        form = form_of(layout, given, LAYOUT)
        axes = _Axes(form, tuple(spec or ()), axis)
        axes.check(mesh, work.op, layout, arrays)
        check_cuts(work, batch_rows=axes.cuts(mesh, "b"), heads=axes.cuts(mesh, "h"))
        names = list(arrays)
        specs = tuple(axes.of(work, layout, name, arrays[name]) for name in names)
        for name, spec_of_array in zip(names, specs, strict=True):
            _check_even(mesh, work.op, name, arrays[name], spec_of_array)
        out = axes.rows

        def on_part(*local: Any) -> Any:
            given = dict(zip(names, local, strict=True)) | rest
            return on_device(**given | axes.origin(given))

        mapped = jax.shard_map(
            on_part,
            mesh=mesh,
            in_specs=specs,
            out_specs=(out, axes.lse) if wants_lse else out,
        )
        return mapped(*resharded(mesh, arrays.values(), specs))

    call.__name__ = f"context_parallel_{work.op}"
    call.__doc__ = op.__doc__
    return call


class _Axes:
    """The axes of a mesh along which the arrays of a call are cut."""

    def __init__(self, form: str, spec: tuple[Any, ...], axis: str | tuple[str, str]) -> None:
        packed = form == PACKED
        given = (*spec, None, None, None)
        batch, rows, heads = (None, *given[:2]) if packed else given[:3]
        if spec and rows != axis:
            fail("context_parallel", "spec", f"{axis!r}, the axis of the call, for rows", f"{rows!r} in {spec}")
        self.by_dim = {"b": batch, "h": heads, "hkv": heads}
        self.axis = axis
        of_form = {PACKED: (axis, heads), "bshd": (batch, axis, heads), "bhsd": (batch, heads, axis)}
        self.rows = PartitionSpec(*of_form[form])
        self.lse = PartitionSpec(heads, axis) if packed else PartitionSpec(batch, heads, axis)
        self.tokens = PartitionSpec(batch, axis)
        self.form = form

    def check(self, mesh: Any, op: str, layout: Layout, arrays: Mapping[str, Any]) -> None:
        """Refuse a mesh without these axes, or with Manual ones, and rows that devices cannot share evenly."""
        names = (*names_of(self.axis), *names_of(self.by_dim["b"]), *names_of(self.by_dim["h"]))
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(types.get(name, AxisType.Manual) == AxisType.Manual for name in names):
            expected = f"a mesh with the axes {', '.join(map(repr, names))}, of the type Auto or Explicit"
            fail("context_parallel", "mesh", expected, ", ".join(f"{name!r} ({each})" for name, each in types.items()))
        _check_ranks(op, layout, self.axis, prod(mesh.shape[name] for name in names_of(self.axis)))
        # A log-decay is `[B, S, Hq]` in either layout, packed `[S, Hq]`.
        axes = {**dict.fromkeys(("q", "k", "v"), row_axis(self.form)), **dict.fromkeys(TOKENS, 1)}
        axes["g"] = 0 if self.form == PACKED else 1
        for name, x in arrays.items():
            rows = axes.get(name)
            if rows is not None and rows < x.ndim and x.shape[rows] % layout.ranks:
                fail(op, name, f"{layout.padded} rows, in the order of layout.shard", f"{x.shape[rows]} in {x.shape}")

    def cuts(self, mesh: Any, dim: str) -> bool:
        """Whether several devices have different batch rows, or heads."""
        return any(mesh.shape[name] > 1 for name in names_of(self.by_dim[dim]))

    def origin(self, given: dict[str, Any]) -> dict[str, Any]:
        """The `dropout_origin` of a device: its batch rows and heads in the whole call. Nothing without dropout."""
        if not given.get("dropout_p") or self.by_dim["b"] is self.by_dim["h"] is None:
            return {}
        q, batch = given["q"], self.by_dim["b"]
        heads = q.shape[head_axis(self.form)]
        batch_row, head, all_heads = given.get("dropout_origin") or (0, 0, heads * _size(self.by_dim["h"]))
        batch_row += 0 if batch is None else jax.lax.axis_index(batch) * q.shape[0]
        head += 0 if self.by_dim["h"] is None else jax.lax.axis_index(self.by_dim["h"]) * heads
        return {"dropout_origin": (batch_row, head, all_heads)}

    def of(self, work: Any, layout: Layout, name: str, x: Any) -> PartitionSpec:
        """How one argument is cut."""
        if name in ("q", "k", "v"):
            return self.rows
        if name in TOKENS:
            return self.tokens
        if name == "kv_lengths":
            return PartitionSpec(self.by_dim["b"])
        if name not in work.tensors:
            return PartitionSpec()
        dims = own_dims(work, layout, name, x.ndim)
        # Among the variant's own tensors only a log-decay is cut by rows, as k is.
        by_dim = self.by_dim | ({"kv_idx": self.axis} if name == "g" else {})
        return PartitionSpec(*(by_dim.get(str(dim)) for dim in dims))


def _check_ranks(op: str, layout: Layout, axis: Any, size: int) -> None:
    if size != layout.ranks:
        fail(op, "layout", f"one planned for the {size} devices of the axis {axis!r}", layout.ranks)


def _check_even(mesh: Any, op: str, name: str, x: Any, spec: PartitionSpec) -> None:
    """Refuse an array with an axis that devices cannot share evenly."""
    for axis, (size, cut) in enumerate(zip(x.shape, spec, strict=False)):
        devices = prod(mesh.shape[each] for each in names_of(cut))
        if size % devices:
            expected = f"a multiple of {devices} along axis {axis}, which the devices of the mesh axis {cut!r} share"
            fail(op, name, expected, f"{size} in {tuple(x.shape)}")


def _size(axes: Any) -> int:
    """How many devices lie along some axes of a mesh."""
    return 1 if axes is None else int(jax.lax.axis_size(axes))
