# SPDX-License-Identifier: Apache-2.0
"""The primitives of an attention op in JAX, for its forward and its backward, and their transformation rules.

On a GPU a primitive lowers to launches of the kernels, elsewhere to the reference, so that one program can be exported
for both. `jax.vmap` folds the mapped axis into batch rows or, in a packed call, into sequences. Under `jax.jit` with
sharded arrays batch rows and heads stay on their devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch  # JAX offers this set nowhere else
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding

from ..core.configs import INTERPRETER
from ..core.settings import require_triton
from .batching import batched
from .kernels import INTERPRET, compiling_for, device_arch
from .passes import Backward, Call, Decay, Forward, Kernels
from .sharding import explicit_specs, meshless, partitioned, varying_alike, whole_type

RESIDUALS = "attention_outputs"
"""The name of o and lse for policies of `jax.checkpoint`. If they are saved, a backward does not repeat the forward."""


@cache
def _forward_of(kernels: Kernels) -> Primitive:
    return attention_primitive(f"{kernels.name}_fwd", Forward(kernels))


@cache
def _backward_of(kernels: Kernels) -> Primitive:
    return attention_primitive(f"{kernels.name}_bwd", Backward(kernels))


@cache
def _decay_of(kernels: Kernels) -> Primitive:
    return attention_primitive(f"{kernels.name}_decay", Decay(kernels))


def attention_primitive(name: str, direction: Forward | Backward) -> Primitive:
    """A primitive with rules for vmap and partitioning, around an inner one with a lowering for each platform."""
    outer, inner = Primitive(name), Primitive(f"{name}_local")
    for primitive in (outer, inner):
        primitive.multiple_results = True
        primitive.def_abstract_eval(partial(_abstract, direction))
        primitive.def_impl(partial(_applied, primitive))

    mlir.register_lowering(outer, partial(_lower_cut, inner, direction))
    mlir.register_lowering(inner, partial(_lower_elsewhere, direction))
    mlir.register_lowering(inner, partial(_lower_cuda, direction), platform="cuda")
    mlir.register_lowering(inner, partial(_refuse, direction.kernels.op), platform="rocm")
    # Partitioning needs the devices while lowering. By default jit lowers without devices if it is given none.
    dispatch.prim_requires_devices_during_lowering.add(outer)
    batching.primitive_batchers[outer] = partial(batched, outer, direction)
    ad.primitive_jvps[outer] = partial(_refuse_derivative, direction.kernels.op)
    return outer


@cache
def _jitted(primitive: Primitive, call: Call) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, call=call))


def _applied(primitive: Primitive, *arrays: jax.Array, call: Call) -> Any:
    """Compute a call outside of any trace."""
    # With jit disabled this function would call itself without end: a primitive can only run by its lowering.
    with jax.disable_jit(False):
        return _jitted(primitive, call)(*arrays)


def _abstract(direction: Forward | Backward, *avals: Any, call: Call) -> list[Any]:
    # A result's type is made from an operand's type, which says over which axes of a mesh values vary.
    like, types, kernels = avals[0], call.named(avals), direction.kernels
    if direction.backward:
        specs = [types[name].sharding.spec for name in ("q", "k", "v", *call.wanted)]
    else:
        letters = {name: kernels.axes(name, call) for name in call.operands}
        specs = explicit_specs(kernels.op, types, letters, kernels.result_axes(call, backward=False))
    return [
        like.update(
            shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=NamedSharding(like.sharding.mesh, spec)
        )
        for (shape, dtype), spec in zip(direction.shapes(call, types), specs, strict=True)
    ]


def _lower_cut(inner: Primitive, direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    """Lower the whole call on one device, and a function that XLA partitions on several."""
    context = ctx.module_context.axis_context
    devices = getattr(context, "num_devices", 0)  # 0 inside of shard_map
    mesh = getattr(context, "mesh", None)  # of shard_map, which may leave some of its axes to XLA
    is_mapped_in_part = mesh is not None and {*mesh.axis_names} > {*context.manual_axes}
    if INTERPRET and (devices > 1 or is_mapped_in_part):
        # JAX's callbacks crash inside of a function that XLA partitions.
        remedy = (
            "call the op inside jax.shard_map over all axes of the mesh, on one device, or without TRITON_INTERPRET"
        )
        op = direction.kernels.op
        raise NotImplementedError(f"{op}: TRITON_INTERPRET=1 runs no sharded arrays under jit: {remedy}")
    function = _partitioned(inner, direction, call)
    # JAX partitions by the devices of the mesh. If no mesh is set, it does not know them: XLA then gathers the arrays.
    if devices == 1 or (is_mapped_in_part and isinstance(mesh, AbstractMesh)):
        function = partial(inner.bind, call=call)
        # Where their types are sharded, operations of JAX ask how to shard their results.
        ctx = ctx.replace(avals_in=[whole_type(x) for x in ctx.avals_in])
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


def _lower_cuda(direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    op = direction.kernels.op
    require_triton(op)
    if INTERPRET:
        raise RuntimeError(f"{op}: TRITON_INTERPRET=1 runs kernels on the CPU: unset it, or set JAX_PLATFORMS=cpu")
    with compiling_for(device_arch(op)), jax.numpy_dtype_promotion("standard"):
        return _lower_local(lambda *arrays: direction.launch(call, arrays), ctx, values)


def _lower_elsewhere(direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    run = direction.launch if INTERPRET else direction.reference
    if INTERPRET:
        require_triton(direction.kernels.op)
    # Whatever promotion the caller allows, references compute with the products of 16 bits and float32.
    with compiling_for(INTERPRETER), jax.numpy_dtype_promotion("standard"):
        return _lower_local(lambda *arrays: run(call, arrays), ctx, values)


def _lower_local(local: Callable[..., Any], ctx: Any, values: Sequence[Any]) -> Any:
    """Lower the computation of one device. It has no mesh if its operands have none, whichever mesh is set."""
    alone = ctx.avals_in[0].sharding.mesh.empty
    return mlir.lower_fun(meshless(local) if alone else local, multiple_results=True)(ctx, *values)


def _refuse_derivative(op: str, *_: Any, **_params: Any) -> Any:
    raise NotImplementedError(
        f"{op}: second derivatives, and those in forward mode, are not implemented; "
        "`reference` in jax_reference.py of the variant is plain JAX, which has them"
    )


def _refuse(op: str, _ctx: Any, *_values: Any, **_params: Any) -> Any:
    raise NotImplementedError(f"{op}: the JAX ops run on NVIDIA GPUs and on the CPU, not on ROCm")


@cache
def _partitioned(inner: Primitive, direction: Forward | Backward, call: Call) -> Callable[..., Any]:
    kernels = direction.kernels

    def of_part(*arrays: jax.Array) -> Any:
        own, kept = call.without_tables(arrays)
        return inner.bind(*kept, call=own)

    return partitioned(
        partial(inner.bind, call=call),
        of_part,
        [kernels.axes(name, call) for name in call.operands],
        kernels.result_axes(call, backward=direction.backward),
        *(False if call.packed else kernels.may_split(call)[0], kernels.may_split(call)[1]),
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """The own tensors whose gradients are wanted, as a static part of the residuals of a forward."""

    names: tuple[str, ...]


def attend(kernels: Kernels, call: Call, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call, differentiable."""
    # Inside shard_map JAX cannot say which gradients are wanted, so all are computed.
    asked = _attend_all if jax.sharding.get_abstract_mesh().manual_axes else _attend
    found: tuple[jax.Array, jax.Array] = asked(kernels, call, tuple(varying_alike(arrays)))
    return found


def _outputs(kernels: Kernels, call: Call, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    o, lse, *_ = _forward_of(kernels).bind(*arrays, call=call)
    return o, lse


_attend = jax.custom_vjp(_outputs, nondiff_argnums=(0, 1))
_attend_all = jax.custom_vjp(_outputs, nondiff_argnums=(0, 1))


def _forward_where_perturbed(kernels: Kernels, call: Call, primals: Any) -> Any:
    asked = dict(zip(call.operands, (x.perturbed for x in primals), strict=True))
    wanted = tuple(name for name in kernels.gradients if asked[name])
    return _saved(kernels, call, tuple(x.value for x in primals), wanted)


def _forward_for_all(kernels: Kernels, call: Call, arrays: tuple[jax.Array, ...]) -> Any:
    return _saved(kernels, call, arrays, kernels.gradients)


def _saved(kernels: Kernels, call: Call, arrays: tuple[jax.Array, ...], wanted: tuple[str, ...]) -> Any:
    """o and lse, and the residuals for the backward."""
    o, lse, *decay = _forward_of(kernels).bind(*arrays, call=call)
    o, lse, *decay = (checkpoint_name(x, RESIDUALS) for x in (o, lse, *decay))
    return (o, lse), (arrays, o, lse, decay, _Wanted(wanted))


def _attend_backward(kernels: Kernels, call: Call, residuals: Any, cotangents: Any) -> Any:
    arrays, o, lse, decay, wanted = residuals
    do, dlse = cotangents
    do = jnp.zeros(o.shape, o.dtype) if isinstance(do, SymbolicZero) else do
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    gradients = _gradients(kernels, call, arrays, (o, lse, *decay), do, dlse, wanted.names)
    return (tuple(gradients.get(name) for name in call.operands),)


def _gradients(
    kernels: Kernels,
    call: Call,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.Array],
    do: jax.Array,
    dlse: jax.Array | None,
    wanted: tuple[str, ...],
) -> dict[str, jax.Array]:
    """The gradients of q, k, v and the wanted operands by name. `results` are the results of the forward."""
    o, lse, *decay = results
    further = {**({"decay": decay[0]} if decay else {}), "o": o, "lse": lse, "do": do}
    if dlse is not None:
        further["dlse"] = dlse
    own = replace(call, operands=(*call.operands, *further), wanted=wanted)
    found = _backward_of(kernels).bind(*varying_alike((*arrays, *further.values())), call=own)
    return dict(zip(("q", "k", "v", *wanted), found, strict=True))


def gradients_of(
    kernels: Kernels,
    call: Call,
    arrays: Sequence[jax.Array],
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    dlse: jax.Array | None,
    wanted: tuple[str, ...],
) -> dict[str, jax.Array]:
    """The same gradients for a call whose o and lse are given."""
    results = [o, lse]
    if kernels.has_decay:
        results.append(_decay_of(kernels).bind(*varying_alike(arrays), call=call)[2])
    return _gradients(kernels, call, arrays, results, do, dlse, wanted)


_attend.defvjp(_forward_where_perturbed, _attend_backward, symbolic_zeros=True)
_attend_all.defvjp(_forward_for_all, _attend_backward)
