# SPDX-License-Identifier: Apache-2.0
"""A call of a JAX op: checks its arguments and passes them to the primitives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..core.checks import PACKED, ArgumentError
from ..core.configs import INTERPRETER, PASSES
from ..core.fp8 import FP8, check_head_dims, check_no_scales, check_takes_fp8
from ..core.options import CallOptions
from ..core.schedules import Schedule, schedule_tables
from ..core.sequences import check_alone
from .fp8 import ScaledForward, attend_scaled, checked_scales
from .kernels import INTERPRET, compiling_for
from .passes import TABLE, Call, Forward, Kernels
from .primitive import attend
from .schedule import call_sizes, check_sequences, launches_on, packed_sizes
from .sequences import SequenceArguments, Tokens, check_order, check_packed, check_tokens, packed_offset
from .support import (
    as_arrays,
    canonical,
    check_inputs,
    host_number,
    int32_array,
    is_known,
    positive_scale,
    query_offset,
)
from .tensor import BF16

__all__ = ["Arguments", "Kernels", "attention", "prepared", "scaled_run", "schedule_of"]


@dataclass(kw_only=True)
class Arguments:
    """The arguments of a call. `q` and `k` are shapes, `[B, H, S, D]` whatever the layout, or packed `[total, H, D]`.

    `by_length`: the call gives no ids or positions of tokens, at most lengths. A variant adds its own `tensors` and
    `scalars`. `scales`: the scales of 8-bit q, k and v, by name.
    """

    op: str
    arrays: tuple[jax.Array, jax.Array, jax.Array]
    q: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct
    layout: str
    scale: float | None
    row_offset: int
    row_offsets: jax.Array | None
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    tokens: Tokens | None
    padding_id: int
    by_length: bool
    options: CallOptions
    tensors: Mapping[str, jax.Array] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    dropout_p: float | None = None
    scales: Mapping[str, jax.Array] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        op: str,
        q: Any,
        k: Any,
        v: Any,
        sequences: SequenceArguments,
        options: CallOptions,
        *,
        layout: str,
        scale: float | None = None,
    ) -> "Arguments":
        """Check the arguments that every op takes."""
        tokens = None
        q_offset, cu_seqlens_q, cu_seqlens_k = sequences.q_offset, sequences.cu_seqlens_q, sequences.cu_seqlens_k
        scale = host_number(op, "scale", scale)
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            check_alone(op, layout, host_number(op, "padding_id", sequences.padding_id), *sequences.of_tokens)
            cu_seqlens_q, cu_seqlens_k = check_packed(op, q, k, v, scale, cu_seqlens_q, cu_seqlens_k)
            row_offset, row_offsets = packed_offset(op, q_offset, cu_seqlens_q, cu_seqlens_k)
            q, k, v = canonical(q), canonical(k), canonical(v)
            layout = PACKED
            shapes = [x.shape for x in (q, k)]
        else:
            q, k, v = check_inputs(op, q, k, v, scale, layout)
            shapes = [_logical(x, layout) for x in (q, k)]
            batch, q_len, kv_len = shapes[0][0], shapes[0][2], shapes[1][2]
            kv_lengths = sequences.kv_lengths
            if kv_lengths is not None:
                kv_lengths = int32_array(op, "kv_lengths", kv_lengths, (batch,))
            tokens = check_tokens(op, batch, q_len, kv_len, sequences, kv_lengths)
            row_offset, row_offsets = query_offset(op, q_offset, batch, q_len, kv_len, kv_lengths)
        return cls(
            op=op,
            arrays=(q, k, v),
            q=jax.ShapeDtypeStruct(shapes[0], q.dtype),
            k=jax.ShapeDtypeStruct(shapes[1], k.dtype),
            layout=layout,
            scale=scale,
            row_offset=row_offset,
            row_offsets=row_offsets,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            tokens=tokens,
            padding_id=host_number(op, "padding_id", sequences.padding_id),
            by_length=all(x is None for x in sequences.of_tokens[:-1]),
            options=options,
        )

    @property
    def packed(self) -> bool:
        return self.layout == PACKED

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes that a schedule of this call must have been made for."""
        if self.packed:
            lengths = (self.cu_seqlens_q.shape[0] - 1, self.q.shape[1], self.q.shape[0], self.k.shape[0])
            return packed_sizes(*lengths, self.row_offset, self.row_offsets)
        lengths = (*self.q.shape[:3], self.k.shape[2])
        return call_sizes(*lengths, self.row_offset, self.row_offsets, self.tokens)


def _logical(x: jax.Array, layout: str) -> tuple[int, ...]:
    b, s, h, d = x.shape
    return (b, h, s, d) if layout == "bshd" else x.shape


def _kernels(dense: Kernels, packed: Kernels, segmented: Kernels, arguments: Arguments) -> Kernels:
    """The kernels of the call's mode."""
    return packed if arguments.packed else dense if arguments.tokens is None else segmented


def _call(kernels: Kernels, arguments: Arguments) -> tuple[Call, list[jax.Array]]:
    """The static part of a call, and its arrays."""
    q, scale = positive_scale(arguments.arrays[0], arguments.scale)
    operands: dict[str, Any] = {"q": q, "k": arguments.arrays[1], "v": arguments.arrays[2], **arguments.tensors}
    if "sink" in operands:
        operands["sink"] = operands["sink"].astype(jnp.float32)
    scalar_arrays, scalar_numbers = as_arrays(dict(arguments.scalars))
    optional = {"row_offsets": arguments.row_offsets, **(arguments.tokens._asdict() if arguments.tokens else {})}
    if arguments.packed:
        optional |= {"cu_seqlens_q": arguments.cu_seqlens_q, "cu_seqlens_k": arguments.cu_seqlens_k}
    operands |= {n: x for n, x in (scalar_arrays | optional).items() if x is not None and n in kernels.parameters}
    numbers = {
        "scale": scale,
        "row_offset": arguments.row_offset,
        "padding_id": arguments.padding_id,
        "options": arguments.options,
        "dropout_p": arguments.dropout_p,
        **scalar_numbers,
    }
    named = tuple((n, x) for n, x in numbers.items() if n in kernels.parameters)
    if arguments.tokens is not None and arguments.by_length:
        operands["kv_lengths"] = arguments.tokens.kv_lengths
        named += (("by_length", True),)
    call = Call(operands=tuple(operands), layout=arguments.layout, numbers=named)
    return call, list(operands.values())


def prepared(
    dense: Kernels, packed: Kernels, segmented: Kernels, arguments: Arguments, schedule: Schedule | None
) -> tuple[Kernels, Call, list[jax.Array]]:
    """The kernels of a call, its static part, and its arrays."""
    kernels = _kernels(dense, packed, segmented, arguments)
    if INTERPRET and arguments.q.dtype == jnp.bfloat16:
        # Triton's interpreter computes bfloat16 wrongly.
        q, k, v = (x.astype(jnp.float32) for x in arguments.arrays)
        arguments.arrays = (q, k, v)
    call, arrays = _call(kernels, arguments)
    arrays = without_gradients(kernels, call, arrays)
    if schedule is not None:
        tables = _checked_tables(kernels, arguments, schedule, call, arrays)
        call = replace(call, operands=(*call.operands, *(f"{TABLE}{i}" for i in range(len(tables)))))
        arrays += tables
    return kernels, call, arrays


def is_empty(arguments: Arguments) -> bool:
    """Whether a packed call has no key or no query at all, so that kernels have nothing to read."""
    return arguments.packed and 0 in (arguments.q.shape[0], arguments.k.shape[0])


def attention(
    dense: Kernels, packed: Kernels, segmented: Kernels, arguments: Arguments, schedule: Schedule | None
) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call. o has the layout of q, and its dtype, or bfloat16 if q has 8 bits."""
    dtype, forward, run = arguments.q.dtype, Forward, attend
    kernels, call, arrays = prepared(dense, packed, segmented, arguments, schedule)
    if arguments.scales:
        dtype, forward, run = BF16, ScaledForward, attend_scaled
        call = replace(call, operands=(*call.operands, *arguments.scales))
        arrays += arguments.scales.values()
    if is_empty(arguments):
        o, lse, *_ = forward(kernels).plain(call, arrays)
        return o.astype(dtype), lse
    order = _order(kernels, arguments)
    o, lse = run(kernels, call, arrays)
    if order is not None:
        o, lse = o * order.reshape(-1, 1, 1, 1).astype(o.dtype), lse * order.reshape(-1, 1, 1).astype(lse.dtype)
    return o.astype(dtype), lse


def scaled_run(op: str, q: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Callable[..., Any]:
    """The function that computes a call without pages: `attention`, with checked scales if q is float8_e4m3fn."""
    dtype = str(getattr(q, "dtype", type(q).__name__))
    if dtype != FP8:
        check_no_scales(op, dtype, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return attention
    check_takes_fp8(op)
    return partial(_scaled_attention, (q_scale, k_scale, v_scale))


def _scaled_attention(
    scales: Sequence[Any],
    dense: Kernels,
    packed: Kernels,
    segmented: Kernels,
    arguments: Arguments,
    schedule: Schedule | None,
) -> tuple[jax.Array, jax.Array]:
    rows = arguments.cu_seqlens_q.shape[0] - 1 if arguments.packed else arguments.q.shape[0]
    heads = (arguments.q.shape[1], arguments.k.shape[1])
    check_head_dims(arguments.op, q=arguments.q.shape[-1], v=arguments.arrays[2].shape[-1])
    arguments.scales = checked_scales(arguments.op, scales, rows, heads)
    return attention(dense, packed, segmented, arguments, schedule)


def _order(kernels: Kernels, arguments: Arguments) -> jax.Array | None:
    """The result of `check_order` for the positions of a call."""
    if arguments.packed:
        return None
    batch, _, q_len, _ = arguments.q.shape
    lengths = (batch, q_len, arguments.k.shape[2])
    return check_order(arguments.op, arguments.tokens, *lengths, arguments.padding_id, kernels.by_row)


def _checked_tables(
    kernels: Kernels, arguments: Arguments, schedule: Schedule, call: Call, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    tiles = None
    if arch := launches_on():
        with compiling_for(arch):
            tiles = kernels.tiles(call, arrays)
    tables = schedule_tables(arguments.op, schedule, arguments.sizes, tiles)
    if arguments.packed:
        check_sequences(arguments.op, schedule, arguments.cu_seqlens_q, arguments.cu_seqlens_k)
    return tables


def schedule_of(dense: Kernels, packed: Kernels, segmented: Kernels, arguments: Arguments, backward: bool) -> Schedule:
    """The schedule of a call. It is empty if the reference is computed instead of the kernels."""
    kernels = _kernels(dense, packed, segmented, arguments)
    sequences = (arguments.cu_seqlens_q, arguments.cu_seqlens_k) if arguments.packed else ()
    arch = launches_on()
    call, arrays = _call(kernels, arguments)
    with compiling_for(arch or INTERPRETER):
        tiles = kernels.tiles(call, arrays)
        if arch is None:
            return Schedule(op=arguments.op, call=arguments.sizes, sequences=sequences, tiles={}, tables=())
        tables = kernels.tables(call, arrays, backward)
    passes = PASSES if backward else PASSES[:1]
    blocks = {each: (tiles[each].block_m, tiles[each].block_n) for each in passes}
    return Schedule(op=arguments.op, call=arguments.sizes, sequences=sequences, tiles=blocks, tables=tables)


# ------------------------------------------------------------------------------------------------- without a gradient

_REMEDY = "detach it with jax.lax.stop_gradient"
_OF_TENSOR = f'variants.yaml declares it without a gradient: add "grad: true" to its entry, or {_REMEDY}'
_OF_MASK = f"only the mask reads it, which has no gradient: {_REMEDY}"
_OF_SCALAR = f"a scalar has no gradient: declare a tensor of dims [] with grad: true in its place, or {_REMEDY}"


def without_gradients(kernels: Kernels, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a call. Differentiation by a floating-point array without a gradient raises an ArgumentError."""
    return [_guarded(kernels, name, x) for name, x in zip(call.operands, arrays, strict=True)]


def _guarded(kernels: Kernels, name: str, x: jax.Array) -> jax.Array:
    # An array with known values is no tracer, so nothing is differentiated by it.
    if name in ("q", "k", "v", *kernels.gradients) or is_known(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    reason = _OF_SCALAR if name in kernels.scalars else _OF_MASK if name in kernels.mask_only else _OF_TENSOR
    guarded: jax.Array = _fixed(f"{kernels.op}: {name}: it requires grad, but {reason}", x)
    return guarded


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fixed(message: str, x: jax.Array) -> jax.Array:
    """`x` itself. Unlike in a custom_vjp, the rule also learns inside shard_map whether `x` has a tangent."""
    del message
    return x


@partial(_fixed.defjvp, symbolic_zeros=True)
def _fixed_jvp(message: str, primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise ArgumentError(message)
    return primals[0], tangents[0]
