"""What JAX knows of an attention op: primitives for its forward and its backward, and the rules of its transformations.

A call's arrays are the operands of a primitive, everything else is one hashable `Call`. On a GPU a primitive lowers to
launches of the kernels, elsewhere to the reference, so that one program can be exported for both. `jax.vmap` folds its
axis into batch rows or, packed, into sequences; under `jax.jit` with sharded arrays batch rows and heads stay where
they are.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch  # JAX offers this set nowhere else
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .configs import INTERPRETER
from .jax_kernels import HAS_TRITON, INTERPRET, compiling_for, device_arch
from .jax_sharding import partitioned
from .jax_tensor import FP32, Tensor

RESIDUALS = "attention_outputs"
"""The name of o and lse for the policies of `jax.checkpoint`: with them saved, a backward runs no forward again."""

PACKED = "packed"
# The axes of q, k, v and o by layout: batch, heads, key heads, rows of queries and of keys, D and Dv.
_AXES = {
    "bhsd": {"q": "bhsd", "k": "bktd", "v": "bkte", "o": "bhse", "lse": "bhs", "decay": "bh."},
    "bshd": {"q": "bshd", "k": "btkd", "v": "btke", "o": "bshe", "lse": "bhs", "decay": "bh."},
    PACKED: {"q": "shd", "k": "tkd", "v": "tke", "o": "she", "lse": "hs", "decay": ".ht"},
}
_LOGICAL = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
_TOKENS = {"q_segment_ids": "bs", "kv_segment_ids": "bt", "q_positions": "bs", "kv_positions": "bt", "row_offsets": "b"}
_BEGINS = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True, kw_only=True)
class Call:
    """All of a call but its arrays: names of these, in order, its layout, and its numbers by parameter."""

    operands: tuple[str, ...]
    layout: str
    numbers: tuple[tuple[str, Hashable], ...]
    wanted: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        return self.layout == PACKED

    def number(self, name: str) -> Any:
        return dict(self.numbers).get(name)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.operands, arrays, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernels:
    """The kernels of a variant in one mode of calls, and what else its primitives need.

    `launches` is the module with `forward`, `backward` and `tiles_of`, and `make_tables` where blocks are read from
    tables; `parameters` are those of `forward`. `dims` are those of the variant's own tensors, as the mode has them;
    `gradients` those of them that have one, and `flags` the parameter that asks for it, if any. Batch rows may be told
    apart, and heads, by nothing but the elements they read where `splits_batch` and `splits_heads`: then an axis may be
    folded in, or cut.
    """

    name: str
    mode: str
    launches: Any
    reference: Callable[..., Any]
    parameters: tuple[str, ...]
    dims: Mapping[str, tuple[str | int, ...]]
    scalars: tuple[str, ...]
    gradients: tuple[str, ...]
    flags: Mapping[str, str]
    splits_batch: bool
    splits_heads: bool

    @cached_property
    def forward_p(self) -> Primitive:
        return _primitive(f"{self.name}_fwd", Forward(self))

    @cached_property
    def backward_p(self) -> Primitive:
        return _primitive(f"{self.name}_bwd", Backward(self))

    @property
    def has_decay(self) -> bool:
        return "g" in self.dims

    def axes(self, name: str, call: Call) -> str:
        """A letter for each axis of an operand; a point for one that nothing else shares."""
        own = _AXES[call.layout]
        if name in own:
            return own[name]
        if name in ("do", "dlse"):
            return own[name[1:]]
        if name in _TOKENS:
            return _TOKENS[name]
        letters = {"b": "b", "h": "h", "hkv": "k", **({"q_idx": "s", "kv_idx": "t"} if call.packed else {})}
        return "".join(letters.get(str(dim), ".") for dim in self.dims.get(name, ()))

    def tables(self, call: Call, arrays: Sequence[jax.Array], backward: bool) -> tuple[jax.Array, ...]:
        """The tables of a schedule; those of passes with the same blocks are the same arrays."""
        if "block_tables" not in self.parameters:
            return ()
        given = keywords(self, call, call.named(arrays))
        names = inspect.signature(self.launches.make_tables).parameters
        made = self.launches.make_tables(**{n: x for n, x in given.items() if n in names}, backward=backward)
        return tuple(table.value() for table in made)

    def result_axes(self, call: Call, *, backward: bool) -> list[str]:
        if backward:
            return [self.axes(name, call) for name in ("q", "k", "v", *call.wanted)]
        return [self.axes(name, call) for name in ("o", "lse", *(["decay"] if self.has_decay else []))]

    def may_split(self, call: Call) -> tuple[bool, bool]:
        """Whether batch rows, and heads, may be regrouped: what dropout drops goes by their numbers."""
        drops = bool(call.number("dropout_p"))
        return self.splits_batch and not drops, self.splits_heads and not drops


class Forward:
    """The forward as launches and as reference: `(o, lse)`, and the cumulative decay for the backward."""

    backward = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        q, v = avals["q"], avals["v"]
        o = (*q.shape[:-1], v.shape[-1])
        b, h, s = _batch_heads_rows(q, call)
        found = [(o, q.dtype), ((h, s) if call.packed else (b, h, s), FP32)]
        if self.kernels.has_decay:
            g = avals["g"]
            found.append(((1, h, g.shape[0]) if call.packed else (b, h, g.shape[1]), FP32))
        return found

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        given = keywords(self.kernels, call, call.named(arrays))
        o, lse, *decay = self.kernels.launches.forward(**given)
        results = [o.value(), lse.value(), *(x.value() for x in decay)]
        return [results[0], results[1].reshape(results[1].shape[-2:]) if call.packed else results[1], *results[2:]]

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        operands = call.named(arrays)
        o, lse = _reference(self.kernels, call, operands)
        shapes = self.shapes(call, operands)
        return [o, lse.astype(FP32), *(jnp.zeros(shape, dtype) for shape, dtype in shapes[2:])]


class Backward:
    """The backward as launches and as derivative of the reference: dq, dk, dv and the gradients that are wanted."""

    backward = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        return [(avals[name].shape, avals[name].dtype) for name in ("q", "k", "v", *call.wanted)]

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        kernels, operands = self.kernels, call.named(arrays)
        given = {"dlse": None} | keywords(kernels, call, operands)
        given |= {flag: name in call.wanted for name, flag in kernels.flags.items()}
        found = kernels.launches.backward(**given)
        gradients = [x.value() if isinstance(x, Tensor) else x for x in found]
        own = dict(zip(kernels.gradients, gradients[3:], strict=True))
        return [*gradients[:3], *(own[name] for name in call.wanted)]

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        operands = call.named(arrays)
        names = ("q", "k", "v", *call.wanted)
        do, dlse = operands.pop("do"), operands.pop("dlse", None)

        def outputs(*trained: jax.Array) -> Any:
            o, lse = _reference(self.kernels, call, operands | dict(zip(names, trained, strict=True)))
            return o, lse.astype(FP32)

        (_, lse), pullback = jax.vjp(outputs, *(operands[name] for name in names))
        return list(pullback((do, jnp.zeros_like(lse) if dlse is None else dlse)))


def _batch_heads_rows(q: Any, call: Call) -> tuple[int, int, int]:
    if call.packed:
        return 1, q.shape[1], q.shape[0]
    b, h, s, _ = (q.shape[axis] for axis in _LOGICAL[call.layout])
    return b, h, s


def keywords(kernels: Kernels, call: Call, operands: dict[str, jax.Array]) -> dict[str, Any]:
    """The arguments of the launches: tensors for a call's arrays, None for what it does not give, and numbers."""
    b, _, q_len = _batch_heads_rows(operands["q"], call)
    kv_len = operands["k"].shape[call.layout.find("s") if not call.packed else 0]
    sizes = {"s": q_len, "t": kv_len}
    found: dict[str, Any] = dict.fromkeys(kernels.parameters)
    tables = []
    for name, array in operands.items():
        if name.startswith("table_"):
            tables.append(Tensor.of(array))
        elif name in ("q", "k", "v", "o", "do"):
            found[name] = Tensor.packed(array) if call.packed else Tensor.of(array, _LOGICAL[call.layout])
        elif name in ("lse", "dlse") and call.packed:
            found[name] = Tensor.of(array[None])
        elif name in _TOKENS and name != "row_offsets":
            found[name] = Tensor.repeated(array, (b, sizes[_TOKENS[name][1]]))
        else:
            found[name] = Tensor.of(array, element="uint64" if name == "seed" else "")
    found |= dict(call.numbers)
    if "block_tables" in found:
        found["block_tables"] = tables
    return found


def _reference(kernels: Kernels, call: Call, operands: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The reference on a call's arrays, which is called by other names."""
    numbers: dict[str, Any] = dict(call.numbers)
    given = {n: x for n, x in {**numbers, **operands}.items() if n in kernels.dims or n in kernels.scalars}
    tokens: dict[str, Any] = {n: operands[n] for n in (*_TOKENS, *_BEGINS) if n in operands and n != "row_offsets"}
    if "padding_id" in numbers:
        tokens["padding_id"] = numbers["padding_id"]
    if not call.packed:
        tokens["layout"] = call.layout
    offset = operands.get("row_offsets", numbers.get("row_offset", 0))
    q, k, v = operands["q"], operands["k"], operands["v"]
    o, lse = kernels.reference(q, k, v, **given, **tokens, scale=numbers["scale"], q_offset=offset, return_lse=True)
    return o, lse


# ---------------------------------------------------------------------------------------------------------- primitives


def _primitive(name: str, direction: Forward | Backward) -> Primitive:
    """A primitive that maps and is partitioned, around one that lowers for each platform."""
    outer, inner = Primitive(name), Primitive(f"{name}_local")
    for primitive in (outer, inner):
        primitive.multiple_results = True
        primitive.def_abstract_eval(partial(_abstract, direction))
        primitive.def_impl(partial(_applied, primitive))

    mlir.register_lowering(outer, partial(_lower_cut, inner, direction))
    mlir.register_lowering(inner, partial(_lower_elsewhere, direction))
    mlir.register_lowering(inner, partial(_lower_cuda, direction), platform="cuda")
    mlir.register_lowering(inner, partial(_refuse, name), platform="rocm")
    # Lowered without devices, as jit else does where none are given, it could not be cut.
    dispatch.prim_requires_devices_during_lowering.add(outer)
    batching.primitive_batchers[outer] = partial(_batch, outer, direction)
    return outer


@cache
def _jitted(primitive: Primitive, call: Call) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, call=call))


def _applied(primitive: Primitive, *arrays: jax.Array, call: Call) -> Any:
    """A call outside of any trace."""
    return _jitted(primitive, call)(*arrays)


def _abstract(direction: Forward | Backward, *avals: Any, call: Call) -> list[Any]:
    # Made from an operand's type, a result's knows over which axes of a mesh it varies.
    like, found = avals[0], []
    for shape, dtype in direction.shapes(call, call.named(avals)):
        placed = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
        found.append(like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=placed))
    return found


def _lower_cut(inner: Primitive, direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    """On one device the call as it is, on more as XLA cuts it."""
    one_device = getattr(ctx.module_context.axis_context, "num_devices", 0) == 1
    function = partial(inner.bind, call=call) if one_device else _partitioned(inner, direction, call)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


def _lower_cuda(direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    name = direction.kernels.name
    if not HAS_TRITON:
        raise ModuleNotFoundError(f"{name}: on a GPU this op needs Triton: pip install 'triton>=3.6,<3.10'")
    if INTERPRET:
        raise RuntimeError(f"{name}: TRITON_INTERPRET=1 runs kernels on the CPU: unset it, or set JAX_PLATFORMS=cpu")
    with compiling_for(device_arch(name)):
        return mlir.lower_fun(lambda *arrays: direction.launch(call, arrays), multiple_results=True)(ctx, *values)


def _lower_elsewhere(direction: Forward | Backward, ctx: Any, *values: Any, call: Call) -> Any:
    if not INTERPRET:
        return mlir.lower_fun(lambda *arrays: direction.reference(call, arrays), multiple_results=True)(ctx, *values)
    with compiling_for(INTERPRETER):
        return mlir.lower_fun(lambda *arrays: direction.launch(call, arrays), multiple_results=True)(ctx, *values)


def _refuse(name: str, _ctx: Any, *_values: Any, **_params: Any) -> Any:
    raise NotImplementedError(f"{name}: the JAX ops run on NVIDIA GPUs and on the CPU, not on ROCm")


@cache
def _partitioned(inner: Primitive, direction: Forward | Backward, call: Call) -> Callable[..., Any]:
    kernels = direction.kernels
    return partitioned(
        partial(inner.bind, call=call),
        [kernels.axes(name, call) for name in call.operands],
        kernels.result_axes(call, backward=direction.backward),
        *(False if call.packed else kernels.may_split(call)[0], kernels.may_split(call)[1]),
    )


# ----------------------------------------------------------------------------------------------------------- vmap


def _batch(
    primitive: Primitive, direction: Forward | Backward, arrays: Sequence[Any], axes: Sequence[Any], *, call: Call
) -> Any:
    """One call for all where its axis can be folded into batch rows or sequences, else one call after the other."""
    mapped = [axis is not None for axis in axes]
    arrays = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    size = next(x.shape[0] for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped)
    kernels = direction.kernels
    folds = [_fold_axis(kernels, name, call) for name in call.operands]
    results = [_folded(letters, call) for letters in kernels.result_axes(call, backward=direction.backward)]
    possible = all(fold is not None for fold, is_mapped in zip(folds, mapped, strict=True) if is_mapped)
    if kernels.may_split(call)[0] and possible and None not in results and size > 0:
        total = _tokens(call, arrays, mapped)
        folded = [
            _fold(name, x, fold, size, is_mapped, total)
            for name, x, fold, is_mapped in zip(call.operands, arrays, folds, mapped, strict=True)
        ]
        found = primitive.bind(*folded, call=call)
        split = [_unfold(x, axis or 0, size) for x, axis in zip(found, results, strict=True)]
        return split, [0] * len(split)

    def one(own: Sequence[jax.Array]) -> Any:
        rest = iter(own)
        return primitive.bind(*(next(rest) if m else x for x, m in zip(arrays, mapped, strict=True)), call=call)

    found = jax.lax.map(one, [x for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped])
    return found, [0] * len(found)


def _folded(letters: str, call: Call) -> int | None:
    """The axis that batch rows, or sequences, lie along."""
    for letter in "stb" if call.packed else "b":
        if letter in letters:
            return letters.index(letter)
    return None


def _fold_axis(kernels: Kernels, name: str, call: Call) -> int | None:
    return 0 if name in _BEGINS else _folded(kernels.axes(name, call), call)


def _tokens(call: Call, arrays: Sequence[Any], mapped: Sequence[bool]) -> dict[str, int]:
    """Packed: how many queries and keys one call has, which is where the sequences of the next begin."""
    if not call.packed:
        return {}
    q_rows, k_rows = (x.shape[int(is_mapped)] for x, is_mapped in zip(arrays[:2], mapped[:2], strict=True))
    return {"cu_seqlens_q": q_rows, "cu_seqlens_k": k_rows}


def _fold(name: str, x: Any, axis: int | None, size: int, is_mapped: bool, totals: Mapping[str, int]) -> Any:
    """The operand of one call for all: mapped at axis 0, or the same for each."""
    if axis is None:
        return x
    if not is_mapped:
        if name not in _BEGINS and x.shape[axis] == 1 and name in _TOKENS:
            return x  # One for all rows stays one.
        x = jnp.broadcast_to(x, (size, *x.shape))
    if name in _BEGINS:
        starts = jnp.arange(size, dtype=jnp.int32)[:, None] * totals[name]
        end = jnp.full(1, size * totals[name], jnp.int32)
        return jnp.concatenate([(x[:, :-1] + starts).reshape(-1), end])
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _unfold(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]), axis, 0)


# ---------------------------------------------------------------------------------------------------------- gradients


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Own tensors whose gradient is wanted, as part of what a forward leaves for its backward."""

    names: tuple[str, ...]


def attend(kernels: Kernels, call: Call, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call, differentiable."""
    # Inside shard_map JAX cannot say which gradients are wanted: there all are.
    asked = _attend_all if jax.sharding.get_abstract_mesh().manual_axes else _attend
    found: tuple[jax.Array, jax.Array] = asked(kernels, call, tuple(_varying_alike(arrays)))
    return found


def _varying_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map, arrays that all vary over the axes that any of them does; gradients are summed outside."""
    axes = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
    every = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(arrays, axes, strict=True)
    ]


def _outputs(kernels: Kernels, call: Call, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    o, lse, *_ = kernels.forward_p.bind(*arrays, call=call)
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
    """o and lse, and what the backward needs."""
    o, lse, *decay = kernels.forward_p.bind(*arrays, call=call)
    o, lse = checkpoint_name(o, RESIDUALS), checkpoint_name(lse, RESIDUALS)
    return (o, lse), (arrays, o, lse, decay, _Wanted(wanted))


def _attend_backward(kernels: Kernels, call: Call, residuals: Any, cotangents: Any) -> Any:
    arrays, o, lse, decay, wanted = residuals
    do, dlse = cotangents
    do = jnp.zeros(o.shape, o.dtype) if isinstance(do, SymbolicZero) else do
    further = {**({"decay": decay[0]} if decay else {}), "o": o, "lse": lse, "do": do}
    if not isinstance(dlse, SymbolicZero):
        further["dlse"] = dlse
    own = replace(call, operands=(*call.operands, *further), wanted=wanted.names)
    found = kernels.backward_p.bind(*_varying_alike((*arrays, *further.values())), call=own)
    gradients = dict(zip(("q", "k", "v", *wanted.names), found, strict=True))
    return (tuple(gradients.get(name) for name in call.operands),)


_attend.defvjp(_forward_where_perturbed, _attend_backward, symbolic_zeros=True)
_attend_all.defvjp(_forward_for_all, _attend_backward)
