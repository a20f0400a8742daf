# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a call, and conversions to what the kernels read."""

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from ..core.checks import (
    Size,
    check_layout,
    check_offset,
    check_scale,
    check_seed,
    check_shapes,
    check_sizes,
    fail,
    host_number,
    shown,
    sizes_text,
)
from ..core.sequences import refuse_nested
from .dispatch import values_are_checked
from .dtypes import FLOAT_DTYPES, FP8_DTYPE, as_integers, check_strided, in_dtype, is_autocast, is_integer
from .replay import drawn_seed
from .transforms import refuse_gradient_of, refuse_tangents

_INPUT_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)


def check_inputs(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> None:
    """Check q, k, v, scale and layout."""
    check_layout(op, layout)
    check_qkv(op, q, k, v, scale, layout)


def check_qkv(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> None:
    """Check q, k, v and scale; `layout` may be PACKED."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(op, name, x)
    if q.dtype not in _INPUT_DTYPES:
        fail(op, "q", "dtype float16, bfloat16 or float32", q.dtype)
    # Under autocast rotary embeddings in float32 leave q and k in another dtype than v.
    are_cast = is_autocast(q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype and not (are_cast and x.dtype in FLOAT_DTYPES):
            fail(op, name, f"dtype {q.dtype}, that of q", x.dtype)
        if x.device != q.device:
            fail(op, name, f"device {q.device}, that of q", x.device)
    check_shapes(op, layout, q.shape, k.shape, v.shape)
    refuse_tangents(op, q=q, k=k, v=v)
    if scale is not None:
        check_scale(op, scale)


def check_tensor(
    op: str,
    name: str,
    x: Any,
    shape: tuple[Size, ...],
    dtypes: tuple[str, ...],
    like: Tensor,
    tile_axes: tuple[int, ...] = (),
    no_gradient: str = "",
) -> Tensor:
    """One of a variant's own tensors, checked and cast to one of `dtypes`: floats to floats, integers to integers.

    Offsets along `tile_axes` are 32-bit in the kernels. `no_gradient` is the reason why a float tensor has no gradient.
    A tensor without elements, in a call without keys or queries, is replaced by one that reads as 0 everywhere.
    """
    if not isinstance(x, Tensor):
        got = "nothing" if x is None else type(x).__name__
        fail(op, name, f"a torch.Tensor of shape {sizes_text(shape)}", got)
    if x.device != like.device:
        fail(op, name, f"device {like.device}, that of q", x.device)
    check_strided(op, name, x)
    check_sizes(op, name, x.shape, shape)
    refuse_tangents(op, **{name: x})
    if no_gradient:
        refuse_gradient_of(x, op, name, no_gradient)
    cast = in_dtype(op, name, x, dtypes)
    for axis in tile_axes:
        if (cast.shape[axis] - 1) * cast.stride(axis) >= 2**31:
            got = f"size {cast.shape[axis]} and stride {cast.stride(axis)}"
            fail(op, name, f"(size - 1) * stride of axis {axis} below 2**31", got)
    return readable(cast) if 0 in x.shape else cast


def readable(x: Tensor) -> Tensor:
    """A tensor from which any clamped index reads an element: an empty axis, which has none, gets one that is 0."""
    empty = [axis for axis, size in enumerate(x.shape) if size == 0]
    return x.sum(empty, keepdim=True, dtype=x.dtype) if empty else x


def query_offset(
    op: str, q_offset: Any, q: Tensor, k: Tensor, kv_lengths: Tensor | None = None
) -> tuple[int, Tensor | None]:
    """The offset as (number, None) or (0, one int32 per batch row); q and k are `[B, H, S, D]`.

    `"end"` aligns the last query with the last key: that of the batch row if there are `kv_lengths`, checked integers.
    Lengths count no keys beyond those of k.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    if isinstance(q_offset, Tensor) and q_offset.dim() > 0:
        return 0, offset_tensor(op, q_offset, q.shape[0], q.device)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        if kv_lengths is None:
            return kv_len - q_len, None
        return 0, kv_lengths.to(torch.int32).clamp(0, kv_len) - q_len
    return offset_number(op, q_offset), None


def offset_number(op: str, q_offset: Any) -> int:
    """An offset for all queries, checked."""
    if isinstance(q_offset, (list, tuple)):
        fail(op, "q_offset", "an int, 'end' or an integer tensor", shown(q_offset))
    return check_offset(op, q_offset)


def offset_tensor(op: str, q_offset: Tensor, count: int, device: torch.device) -> Tensor:
    """Offsets of so many batch rows or sequences, checked."""
    refuse_nested(op, "q_offset", q_offset)
    if not is_integer(q_offset.dtype) or q_offset.shape != (count,) or q_offset.device != device:
        got = f"{q_offset.dtype} {list(q_offset.shape)} on {q_offset.device}"
        fail(op, "q_offset", f"an int, 'end' or an integer tensor [{count}] on {device}", got)
    found = as_integers(op, "q_offset", q_offset).contiguous()
    if values_are_checked(found):
        # `tolist` calls no operator of torch. A call that does, in order to read values, is not recorded for replay.
        for number in found.tolist():
            check_offset(op, number)
    return found


def check_offset_word(op: str, q_offset: str) -> None:
    if q_offset != "end":
        fail(op, "q_offset", "an int, 'end' or an integer tensor", shown(q_offset))


def dropout_seed(op: str, dropout_p: float, seed: object) -> int:
    """The seed of a call, checked; if none is given, one from torch's default CPU generator."""
    if isinstance(seed, Tensor) and torch.compiler.is_compiling():
        # A trace has no value to check: the compiled call checks it.
        number = host_number(op, "seed", seed)
        torch._check(number >= 0)
        return number  # type: ignore[no-any-return]
    if seed is None:
        if dropout_p == 0:
            return 0  # Nothing is drawn: the state of the generator stays.
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            fail(op, "seed", "an int under torch.compile and torch.jit.trace, which would repeat one drawn seed", None)
        seed = drawn_seed()
    try:
        return check_seed(op, seed)
    except DataDependentOutputException:
        return 0  # The seed is a fake tensor: it has no value, and neither have the results.


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Kernels take the maximum before they scale. So a scale's sign, or a zero, is moved into q, without rounding."""
    if scale is None:
        return q, 1.0 / math.sqrt(q.shape[-1])
    scale = float(scale)
    if scale > 0:
        return q, scale
    if q.dtype == FP8_DTYPE:
        bits = q.view(torch.uint8)
        return (bits ^ 128 if scale < 0 else bits * 0).view(FP8_DTYPE), abs(scale) or 1.0
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)
