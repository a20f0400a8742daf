# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the JAX ops: shapes and types, which are known while a function is traced."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.checks import Size, check_layout, check_scale, check_shapes, check_sizes, fail, shown, sizes_text
from ..core.fp8 import FP8
from ..core.settings import DEBUG

_INPUT_DTYPES = ("float16", "bfloat16", "float32")


def is_array(x: object) -> bool:
    """Whether an argument is a JAX array, traced or not, or a numpy array."""
    return isinstance(x, (jax.Array, np.ndarray))


def is_known(x: object) -> bool:
    """Whether the values of an array are known: it is not traced."""
    return not isinstance(x, jax.core.Tracer)


def canonical(x: Any) -> Any:
    """A numpy array as a JAX array, in the dtype that JAX uses for it; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def as_array(op: str, argument: str, x: Any, expected: str) -> jax.Array:
    """What `jnp.asarray` makes of an argument, which may be a list; an error that names what is no array."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        fail(op, argument, expected, type(x).__name__)


def check_flag(op: str, argument: str, value: Any) -> bool:
    """An argument that is True or False, checked. It may be an array `[]` that is known while a function is traced."""
    found = host_number(op, argument, value)
    if isinstance(found, jax.core.Tracer):
        fail(op, argument, "True or False, known while tracing", "a traced array")
    return checks.check_flag(op, argument, found)


def check_inputs(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check q, k, v, scale and layout."""
    check_layout(op, layout)
    return check_qkv(op, q, k, v, scale, layout)


def check_qkv(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check q, k, v and scale; `layout` may be PACKED."""
    q, k, v = canonical(q), canonical(k), canonical(v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            fail(op, name, "a jax.Array", type(x).__name__)
    check_dtypes(op, q, k, v)
    check_shapes(op, layout, q.shape, k.shape, v.shape)
    check_known_scale(op, scale)
    return q, k, v


def check_dtypes(op: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Check the dtypes of q, k and v."""
    if q.dtype.name != FP8:
        check_input_dtype(op, q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            fail(op, name, f"dtype {q.dtype.name}, that of q", x.dtype.name)


def check_input_dtype(op: str, q: jax.Array) -> None:
    """Check the dtype of q."""
    if q.dtype.name not in _INPUT_DTYPES:
        fail(op, "q", "dtype float16, bfloat16 or float32", q.dtype.name)


def check_known_scale(op: str, scale: object) -> None:
    """Check the scale of a call, which may be None."""
    if scale is not None:
        if isinstance(scale, jax.core.Tracer):
            fail(op, "scale", "a Python number, known while tracing: multiply q by one that is not", "a traced array")
        check_scale(op, scale)


def check_tensor(
    op: str, name: str, x: Any, shape: tuple[Size, ...], dtypes: tuple[str, ...], tile_axes: tuple[int, ...] = ()
) -> jax.Array:
    """One of a variant's own tensors, checked and cast to one of `dtypes`: floats to a float, integers to an integer.

    A gradient has the dtype that was given. Offsets along `tile_axes` are 32-bit in the kernels. A tensor without
    elements, in a call without keys or queries, is replaced by a tensor that reads as 0 everywhere.
    """
    if not is_array(x):
        fail(op, name, f"a jax.Array of shape {sizes_text(shape)}", "nothing" if x is None else type(x).__name__)
    check_sizes(op, name, x.shape, shape)
    for axis in tile_axes:
        stride = int(np.prod(x.shape[axis + 1 :]))
        if (x.shape[axis] - 1) * stride >= 2**31:
            got = f"size {x.shape[axis]} and stride {stride}"
            fail(op, name, f"(size - 1) * stride of axis {axis} below 2**31", got)
    return readable(_in_dtype(op, name, x, dtypes))


def readable(x: jax.Array) -> jax.Array:
    """An array in which every clamped index finds an element: an axis of size 0 becomes one element, which is 0."""
    empty = tuple(axis for axis, size in enumerate(x.shape) if size == 0)
    return x.sum(empty, keepdims=True, dtype=x.dtype) if empty else x


def _in_dtype(op: str, name: str, x: Any, dtypes: tuple[str, ...]) -> jax.Array:
    """An array in one of the dtypes that the kernels read."""
    if x.dtype.name in dtypes:
        return jnp.asarray(x)
    dtype = dtypes[-1]
    if dtype == "bool":
        fail(op, name, "dtype bool", x.dtype.name)
    if not dtype.startswith("int"):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            fail(op, name, "a floating-point dtype", x.dtype.name)
        return jnp.asarray(x).astype(dtype)
    if not is_integer(x.dtype):
        fail(op, name, f"dtype {dtype} or another of integers", x.dtype.name)
    # int32 is accepted where int64 is declared, because JAX has no int64 by default.
    return as_integers(op, name, x, "int32" if x.dtype.name == "int32" else dtype)


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is an integer type. bool is not."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


def as_integers(op: str, name: str, x: Any, dtype: str = "int32") -> jax.Array:
    """An array of integers as `dtype`, or as the widest that JAX has. A value that does not fit is an error.

    Values are checked only if they are known and on the host. Otherwise the call would wait for the device.
    """
    kept = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    limits = np.iinfo(kept)
    widest = jnp.iinfo(x.dtype)
    if (widest.max > limits.max or widest.min < limits.min) and x.size > 0 and values_are_checked(x):
        for value in ends(x):
            if not limits.min <= value <= limits.max:
                fail(op, name, f"values that {kept.name} holds", value)
    return jnp.asarray(x).astype(kept)


def ends(x: Any) -> tuple[int, int]:
    """The least and the largest of known integers, computed by numpy: inside `jit` JAX would trace the result."""
    found = np.asarray(x)
    return int(found.min()), int(found.max())


def int32_array(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """An array of integers of this shape, checked, as int32."""
    expected = f"an integer array {list(shape)}"
    if not is_array(x):
        fail(op, name, expected, type(x).__name__)
    if not is_integer(x.dtype) or x.shape != shape:
        fail(op, name, expected, f"{x.dtype.name} {list(x.shape)}")
    return as_integers(op, name, x)


def query_offset(
    op: str, q_offset: Any, count: int, q_len: int, kv_len: int, kv_lengths: jax.Array | None
) -> tuple[int, jax.Array | None]:
    """The offset as (number, None) or (0, one int32 per batch row).

    `"end"` aligns the last query with the last key: that of the batch row if there are `kv_lengths`, int32. Lengths
    count no keys beyond the `kv_len` of the call.
    """
    if is_array(q_offset):
        return 0, offset_array(op, q_offset, count)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        return (kv_len - q_len, None) if kv_lengths is None else (0, jnp.clip(kv_lengths, 0, kv_len) - q_len)
    return offset_number(op, q_offset), None


def offset_number(op: str, q_offset: Any) -> int:
    """An offset for all queries, checked."""
    if isinstance(q_offset, (list, tuple)):
        fail(op, "q_offset", "an int, 'end' or an integer array", shown(q_offset))
    return checks.check_offset(op, host_number(op, "q_offset", q_offset))


def offset_array(op: str, q_offset: Any, count: int) -> jax.Array:
    """The offsets of `count` batch rows or sequences, checked. One offset for all, `[]`, may be traced."""
    if not is_integer(q_offset.dtype) or q_offset.shape not in ((), (count,)):
        got = f"{q_offset.dtype.name} {list(q_offset.shape)}"
        fail(op, "q_offset", f"an int, 'end' or an integer array [{count}]", got)
    found = as_integers(op, "q_offset", q_offset)
    if q_offset.size > 0 and values_are_checked(q_offset):
        for end in ends(q_offset):
            checks.check_offset(op, end)
    return jnp.broadcast_to(found, (count,))


def check_offset_word(op: str, q_offset: str) -> None:
    if q_offset != "end":
        fail(op, "q_offset", "an int, 'end' or an integer array", shown(q_offset))


def host_number(op: str, argument: str, value: Any) -> Any:
    """The number in a numpy scalar, or in an array `[]` in host memory; any other `value` as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if not is_array(value) or value.shape != () or not is_known(value):
        return value
    if not _is_cheap(value):
        expected = "a number, or an array [] on the CPU: no call waits for the device"
        fail(op, argument, expected, "an array [] on a device; its item() waits")
    return value.item()


def check_int(op: str, argument: str, value: Any, **limits: Any) -> Any:
    """An integer scalar of a variant: a number, or an array `[]`, whose value is checked if it is known on the host.

    `limits`: those of `core.checks.check_int`.
    """
    if not is_array(value):
        return checks.check_int(op, argument, host_number(op, argument, value), **limits)
    if value.shape != () or not is_integer(value.dtype):
        fail(op, argument, "an int or an integer array []", f"{value.dtype.name} {list(value.shape)}")
    if values_are_checked(value):
        checks.check_int(op, argument, value.item(), **limits)
    return jnp.asarray(value).astype(jnp.int32)


def check_float(op: str, argument: str, value: Any, **limits: Any) -> Any:
    """A floating-point scalar of a variant: a number or an array `[]`, checked as in `check_int`."""
    if not is_array(value):
        return float(checks.check_float(op, argument, host_number(op, argument, value), **limits))
    if value.shape != () or not (is_integer(value.dtype) or jnp.issubdtype(value.dtype, jnp.floating)):
        fail(op, argument, "a number or an array []", f"{value.dtype.name} {list(value.shape)}")
    if values_are_checked(value):
        checks.check_float(op, argument, value.item(), **limits)
    return jnp.asarray(value).astype(jnp.float32)


def _is_cheap(x: Any) -> bool:
    """Whether reading the values of an array waits for no device."""
    return DEBUG or isinstance(x, np.ndarray) or all(device.platform == "cpu" for device in x.devices())


def values_are_checked(x: Any) -> bool:
    """Whether a call reads the values of an array to check them."""
    return is_known(x) and _is_cheap(x)


def dropout_seed(op: str, dropout_p: float, seed: Any) -> Any:
    """The seed of a call: an int, or uint32 `[2]`, its lower and its upper word."""
    if seed is None:
        if dropout_p == 0:
            return 0
        fail(op, "seed", "an int, a key of jax.random or an integer array []: JAX has no generator of its own", None)
    if not is_array(seed) or (isinstance(seed, np.ndarray) and seed.shape == () and is_integer(seed.dtype)):
        return checks.check_seed(op, host_number(op, "seed", seed))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(seed)
        # A key of another generator than threefry has more words.
        seed = data if seed.shape or data.shape == (2,) else jax.random.bits(seed, (2,), jnp.uint32)
    if seed.shape == () and is_integer(seed.dtype):
        if values_are_checked(seed):
            checks.check_seed(op, int(seed))
        upper = seed >> 32 if seed.dtype.itemsize == 8 else jnp.zeros_like(seed)
        return jnp.stack([seed.astype(jnp.uint32), upper.astype(jnp.uint32) & 0x7FFFFFFF])
    if seed.dtype != np.uint32 or seed.shape != (2,):
        fail(op, "seed", "an int, a key of jax.random or an integer array []", f"{seed.dtype.name} {list(seed.shape)}")
    # The upper bit stays clear, as in seeds that are numbers.
    return jnp.asarray(seed)[::-1] & jnp.asarray([0xFFFFFFFF, 0x7FFFFFFF], jnp.uint32)


def known_origin(origin: Any) -> Any:
    """The `dropout_origin` of a call, with known numbers for arrays `[]` on the host, and int32 for other arrays."""
    return tuple(map(_known_integer, origin)) if isinstance(origin, tuple) else origin


def _known_integer(x: Any) -> Any:
    if not is_array(x) or x.shape != () or not is_integer(x.dtype):
        return x
    return int(x) if values_are_checked(x) else x.astype(jnp.int32)


def as_arrays(scalars: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Hashable]]:
    """A call's scalars, all as arrays if any is an array, else all as numbers: kernels load all of them or none.

    A -0.0 is made an array: as a number it is equal to 0.0, and would get what was compiled for 0.0.
    """
    if not any(is_array(value) or str(value) == "-0.0" for value in scalars.values()):
        return {}, dict(scalars)
    return {name: _as_array(name, value) for name, value in scalars.items()}, {}


def _as_array(name: str, value: Any) -> jax.Array:
    if name == "seed" and not is_array(value):
        return jnp.asarray([value & 0xFFFFFFFF, value >> 32], jnp.uint32)
    return jnp.asarray(value, value.dtype if is_array(value) else jnp.int32 if isinstance(value, int) else jnp.float32)


def positive_scale(q: jax.Array, scale: float | None) -> tuple[jax.Array, float]:
    """q and a positive scale. Kernels take the maximum before they scale, so q takes the sign, or a 0: exactly."""
    if scale is None:
        return q, 1.0 / float(np.sqrt(q.shape[-1]))
    scale = float(scale)
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)
