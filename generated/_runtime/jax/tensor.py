# SPDX-License-Identifier: Apache-2.0
"""Arrays as launches see them: with the order of axes that the kernels expect, and strides."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FP32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
BF16 = np.dtype(jnp.bfloat16)
# Offsets inside a tile are 32-bit: a stride times the most rows or columns of a tile must fit.
_STRIDE_LIMIT = 2**31 // 256


def int64() -> np.dtype:
    """int64 if JAX has it enabled, else int32; then no tensor that kernels read is int64 either."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.int64))


class Tensor:
    """A dense array of shape `memory`, viewed with `shape` and `strides`. An output of a kernel has no `array` yet.

    JAX arrays have no strides, but kernels read q of `[B, S, H, D]` without a copy: here it is viewed as
    `[B, H, S, D]`. `element` is the type that kernels read, if it is not the dtype of the array. `in_parts`: several
    launches fill the tensor, each a part.
    """

    __slots__ = ("array", "dtype", "element", "in_parts", "memory", "shape", "strides", "zeroed")

    def __init__(
        self,
        array: jax.Array | None,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: Any,
        *,
        memory: Sequence[int],
        zeroed: bool = False,
        element: str = "",
    ) -> None:
        self.array = array
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = np.dtype(dtype)
        self.memory = tuple(memory)
        self.zeroed = zeroed
        self.element = element or self.dtype.name
        self.in_parts = False

    @classmethod
    def of(cls, array: jax.Array, axes: Sequence[int] | None = None, *, element: str = "") -> "Tensor":
        """An array as it is, or with its axes in another order."""
        strides = dense_strides(array.shape)
        axes = range(array.ndim) if axes is None else axes
        shape = [array.shape[axis] for axis in axes]
        return cls(array, shape, [strides[axis] for axis in axes], array.dtype, memory=array.shape, element=element)

    @classmethod
    def packed(cls, array: jax.Array) -> "Tensor":
        """Packed sequences `[total, H, D]` as one batch row, `[1, H, total, D]`."""
        total, heads, head_dim = array.shape
        strides = (total * heads * head_dim, head_dim, heads * head_dim, 1)
        return cls(array, (1, heads, total, head_dim), strides, array.dtype, memory=array.shape)

    @classmethod
    def repeated(cls, array: jax.Array, shape: Sequence[int]) -> "Tensor":
        """A dense array viewed with `shape`: an axis of one element may be repeated to any size."""
        own = dense_strides(array.shape)
        strides = [0 if have == 1 < want else step for have, want, step in zip(array.shape, shape, own, strict=True)]
        return cls(array, shape, strides, array.dtype, memory=array.shape)

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return int(self.dtype.itemsize)

    def new_empty(self, shape: int | Sequence[int], dtype: Any = None) -> "Tensor":
        """An output of a kernel, of this dtype unless another is given."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return Tensor(None, shape, dense_strides(shape), dtype or self.dtype, memory=shape)

    def new_zeros(self, shape: int | Sequence[int], dtype: Any = None) -> "Tensor":
        """An output that is set to zero before the kernel runs."""
        made = self.new_empty(shape, dtype)
        made.zeroed = True
        return made

    def value(self) -> jax.Array:
        """The array in memory; zeros if no kernel was launched to fill it, as for a tensor without elements."""
        return jnp.zeros(self.memory, self.dtype) if self.array is None else self.array

    def __getitem__(self, index: Any) -> jax.Array:
        """Elements of a tensor whose axes have the order of the memory."""
        return self.value()[index]

    def reshape(self, *shape: int) -> jax.Array:
        """The elements in another shape. The axes of the tensor have the order of the memory."""
        return self.value().reshape(shape)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def aligned(x: Tensor) -> Tensor:
    """`x` if its rows of D elements begin at multiples of 16 bytes, else a copy with longer rows.

    The kernels load 16 bytes at a time.
    """
    step = 16 // x.element_size()
    size = x.memory[-1]
    if not any(stride % step for stride in x.strides[:-1]):
        if x.strides[2] >= _STRIDE_LIMIT:
            raise ValueError(f"rows lie {x.strides[2]} elements apart, more than the kernels' {_STRIDE_LIMIT}")
        return x
    room = -(-size // step) * step
    array = jnp.pad(x.value(), [(0, 0)] * (len(x.memory) - 1) + [(0, room - size)])
    strides = [*(stride // size * room for stride in x.strides[:-1]), 1]
    return Tensor(array, x.shape, strides, x.dtype, memory=array.shape)


def begin_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one array that differ in their last size."""
    return x.array is not None and x.array is y.array and x.strides == y.strides


def fill_in_parts(*tensors: Tensor) -> None:
    """Mark tensors that several launches fill: each launch keeps what earlier launches have written."""
    for x in tensors:
        x.in_parts = True


def has_even_rows(x: Tensor) -> bool:
    """Whether rows of 8-bit numbers begin at even addresses, so that two columns make one 16-bit number."""
    return not any(stride % 2 for stride in x.strides[:-1])


def empty_like_layout(x: Tensor, last: int, dtype: Any = None) -> Tensor:
    """An empty, dense `[B, H, S, last]` tensor with the memory order of `x`, in the dtype of `x` or another."""
    strides = [stride // x.memory[-1] * last for stride in x.strides[:-1]]
    return Tensor(None, (*x.shape[:3], last), (*strides, 1), dtype or x.dtype, memory=(*x.memory[:-1], last))


def empty_by_tokens(_like: Tensor, shape: tuple[int, int, int, int], dtype: Any) -> Tensor:
    """An empty, dense `[B, H, S, D]` tensor with the memory order B, S, H, D."""
    batch, heads, length, columns = shape
    strides = (length * heads * columns, columns, heads * columns, 1)
    return Tensor(None, shape, strides, dtype, memory=(batch, length, heads, columns))
