"""What the JAX ops check of their arguments: shapes and types, known while a function is traced."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checks
from .checks import Size, check_layout, check_scale, check_shapes, check_sizes, fail, in_range, sizes_text
from .settings import DEBUG

_INPUT_DTYPES = ("float16", "bfloat16", "float32")


def is_array(x: object) -> bool:
    """Whether an argument is an array: of JAX, traced or not, or of numpy."""
    return isinstance(x, (jax.Array, np.ndarray))


def is_known(x: object) -> bool:
    """Whether an array has values, outside of any trace."""
    return not isinstance(x, jax.core.Tracer)


def check_inputs(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check q, k, v, scale and layout."""
    check_layout(op, layout)
    return check_qkv(op, q, k, v, scale, layout)


def check_qkv(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check q, k, v and scale; `layout` may be PACKED."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            fail(op, name, "a jax.Array", type(x).__name__)
    if q.dtype.name not in _INPUT_DTYPES:
        fail(op, "q", "dtype float16, bfloat16 or float32", q.dtype.name)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            fail(op, name, f"dtype {q.dtype.name}, that of q", x.dtype.name)
    check_shapes(op, layout, q.shape, k.shape, v.shape)
    if scale is not None:
        if isinstance(scale, jax.core.Tracer):
            fail(op, "scale", "a Python number, known while tracing: multiply q by one that is not", "a traced array")
        check_scale(op, scale)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def check_tensor(
    op: str, name: str, x: Any, shape: tuple[Size, ...], dtypes: tuple[str, ...], tile_axes: tuple[int, ...] = ()
) -> jax.Array:
    """One of a variant's own tensors, checked. Offsets along `tile_axes` are 32-bit in the kernels.

    Where int64 is declared int32 will do: JAX has no other unless told so. Of a tensor without elements, of a call
    without keys or queries, it is one that reads as 0 everywhere.
    """
    if not is_array(x):
        fail(op, name, f"a jax.Array of shape {sizes_text(shape)}", "nothing" if x is None else type(x).__name__)
    if x.dtype.name not in (*dtypes, *(["int32"] if "int64" in dtypes else [])):
        fail(op, name, f"dtype {' or '.join(dtypes)}", x.dtype.name)
    check_sizes(op, name, x.shape, shape)
    for axis in tile_axes:
        stride = int(np.prod(x.shape[axis + 1 :]))
        if (x.shape[axis] - 1) * stride >= 2**31:
            got = f"size {x.shape[axis]} and stride {stride}"
            fail(op, name, f"(size - 1) * stride of axis {axis} below 2**31", got)
    return readable(jnp.asarray(x))


def readable(x: jax.Array) -> jax.Array:
    """An array with an element for every index to be clamped to: 0 where an axis has none, which has no nearest end."""
    empty = tuple(axis for axis, size in enumerate(x.shape) if size == 0)
    return x.sum(empty, keepdims=True, dtype=x.dtype) if empty else x


def int32_array(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """An int32 array of this shape, checked."""
    expected = f"an int32 array {list(shape)}"
    if not is_array(x):
        fail(op, name, expected, type(x).__name__)
    if x.dtype != np.int32 or x.shape != shape:
        fail(op, name, expected, f"{x.dtype.name} {list(x.shape)}")
    return jnp.asarray(x)


def query_offset(
    op: str, q_offset: Any, count: int, q_len: int, kv_len: int | jax.Array
) -> tuple[int, jax.Array | None]:
    """The offset as (number, None) or (0, one int32 per batch row). `"end"` aligns the last query with the last key.

    `kv_len` is an int32 array where each batch row has a length of its own.
    """
    if is_array(q_offset):
        return 0, offset_array(op, q_offset, count)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        return (kv_len - q_len, None) if isinstance(kv_len, int) else (0, kv_len - q_len)
    return checks.check_int(op, "q_offset", _plain(q_offset)), None


def offset_array(op: str, q_offset: Any, count: int) -> jax.Array:
    """Offsets of so many batch rows or sequences, checked; one for all may be traced."""
    if q_offset.shape == () and q_offset.dtype.kind == "i":
        return jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (count,))
    if q_offset.dtype != np.int32 or q_offset.shape != (count,):
        got = f"{q_offset.dtype.name} {list(q_offset.shape)}"
        fail(op, "q_offset", f"an int, 'end' or an int32 array [{count}]", got)
    return jnp.asarray(q_offset)


def check_offset_word(op: str, q_offset: str) -> None:
    if q_offset != "end":
        fail(op, "q_offset", "an int, 'end' or an int32 array", repr(q_offset))


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's number."""
    return value.item() if isinstance(value, np.generic) else value


def check_int(op: str, argument: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> Any:
    """An integer scalar of a variant: a number, checked, or an array of none of whose values anything is known."""
    if not is_array(value):
        return checks.check_int(op, argument, _plain(value), minimum, maximum)
    if value.shape != () or value.dtype.kind not in "iu":
        fail(op, argument, "an int or an integer array []", f"{value.dtype.name} {list(value.shape)}")
    _check_known(op, argument, value, minimum, maximum)
    return jnp.asarray(value).astype(jnp.int32)


def check_float(op: str, argument: str, value: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A floating-point scalar of a variant: a number, checked, or an array."""
    if not is_array(value):
        return float(checks.check_float(op, argument, _plain(value), minimum, maximum))
    if value.shape != ():
        fail(op, argument, "a number or an array []", f"{value.dtype.name} {list(value.shape)}")
    _check_known(op, argument, value, minimum, maximum)
    return jnp.asarray(value).astype(jnp.float32)


def _check_known(op: str, argument: str, value: Any, minimum: float | None, maximum: float | None) -> None:
    """Check the range of an array that has a value on the host."""
    if (minimum is None and maximum is None) or not is_known(value) or not _is_cheap(value):
        return
    if not in_range(value.item(), minimum, maximum):
        fail(op, argument, f"a number{checks.range_text(minimum, maximum)}", value.item())


def _is_cheap(x: Any) -> bool:
    """Whether reading the values of an array waits for no device."""
    return DEBUG or isinstance(x, np.ndarray) or all(device.platform == "cpu" for device in x.devices())


def values_are_checked(x: Any) -> bool:
    """Whether a call reads what an array holds, to check it."""
    return is_known(x) and _is_cheap(x)


def dropout_seed(op: str, dropout_p: float, seed: Any) -> Any:
    """The seed of a call: an int, or uint32 `[2]`, its lower and its upper word."""
    if seed is None:
        if dropout_p == 0:
            return 0
        fail(op, "seed", "an int, a key of jax.random or an integer array []: JAX has no generator of its own", None)
    if not is_array(seed):
        return checks.check_seed(op, _plain(seed))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.shape == () and seed.dtype.kind in "iu":
        word = jnp.asarray(seed).astype(jnp.uint32)
        return jnp.stack([word, jnp.zeros_like(word)])
    if seed.dtype != np.uint32 or seed.shape != (2,):
        fail(op, "seed", "an int, a key of jax.random or an integer array []", f"{seed.dtype.name} {list(seed.shape)}")
    # The upper bit stays clear, as in seeds that are numbers.
    return jnp.asarray(seed)[::-1] & jnp.asarray([0xFFFFFFFF, 0x7FFFFFFF], jnp.uint32)


def as_arrays(scalars: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Hashable]]:
    """A call's scalars as arrays, or as numbers: one array makes arrays of all, as kernels load all of them or none."""
    if not any(is_array(value) for value in scalars.values()):
        return {}, dict(scalars)
    return {name: _as_array(name, value) for name, value in scalars.items()}, {}


def _as_array(name: str, value: Any) -> jax.Array:
    if name == "seed" and not is_array(value):
        return jnp.asarray([value & 0xFFFFFFFF, value >> 32], jnp.uint32)
    return jnp.asarray(value, value.dtype if is_array(value) else jnp.int32 if isinstance(value, int) else jnp.float32)


def positive_scale(q: jax.Array, scale: float | None) -> tuple[jax.Array, float]:
    """The kernels take the maximum before they scale, so the sign of a scale, or a zero, moves into q: no rounding."""
    if scale is None:
        return q, 1.0 / float(np.sqrt(q.shape[-1]))
    if scale > 0:
        return q, float(scale)
    return (-q, -float(scale)) if scale < 0 else (q * 0, 1.0)
