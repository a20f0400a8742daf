"""How tensors lie in memory: what kernels can read and fill, and packed rows as one batch row."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail

STRIDE_LIMIT = 2**31 // 256
"""Offsets inside a tile are 32-bit: a stride times the most rows or columns of a tile must fit."""


def aligned(x: Tensor) -> Tensor:
    """`x` if its rows of D elements begin at multiples of 16 bytes and its tiles' offsets fit 32 bits, else a copy.

    The kernels load 16 bytes at a time. With less, Triton 3.6 compiles wrong results where D and Dv differ, and the
    loads cost more than the copy.
    """
    step = 16 // x.element_size()
    b, h, s, d = x.stride()
    if d == 1 and s < STRIDE_LIMIT and not (b % step or h % step or s % step or x.data_ptr() % 16):
        return x
    padded = x.new_empty((*x.shape[:3], -(-x.shape[3] // step) * step))
    return padded[..., : x.shape[3]].copy_(x)


def in_memory(x: Any) -> Any:
    """`x`, or a copy of a tensor that torch negates when it reads it, such as `y.conj().imag`: kernels would not."""
    return x.resolve_neg() if isinstance(x, Tensor) and x.is_neg() else x


def check_apart(op: str, name: str, x: Tensor) -> None:
    """Refuse a tensor that is written to if elements share memory because it is expanded: one would replace others."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        expected = "elements that share no memory, because they are written to"
        fail(op, name, expected, f"an expanded tensor, strides {list(x.stride())}")


def begin_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one address, strides and dtype, as views of a tensor that differ in their last size."""
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype


def may_begin_alike(x: Tensor, y: Tensor) -> bool:
    """As `begin_alike`, as far as tensors without memory tell."""
    return x.stride() == y.stride() and x.dtype == y.dtype and x.storage_offset() == y.storage_offset()


def has_even_rows(x: Tensor) -> bool:
    """Whether rows of 8-bit numbers begin at even addresses, so that two columns make one 16-bit number."""
    return x.data_ptr() % 2 == 0 and not any(stride % 2 for stride in x.stride()[:-1])


def empty_like_layout(x: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty `[B, H, S, last]` tensor, dense, its axes in the memory order of `x`, of its dtype or another."""
    strides = x.stride()
    order = sorted(range(3), key=lambda axis: (-strides[axis], axis))
    if order == [0, 1, 2]:
        return x.new_empty((*x.shape[:3], last), dtype=dtype)
    # The result must not be a view of another tensor: autograd would refuse to change it in place.
    dense, step = [0, 0, 0], last
    for axis in reversed(order):
        dense[axis] = step
        step *= x.shape[axis]
    return x.new_empty_strided((*x.shape[:3], last), (*dense, 1), dtype=dtype)


def empty_by_tokens(like: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """An empty `[B, H, S, D]` tensor on the device of `like`, dense, with the memory order B, S, H, D."""
    _, heads, length, columns = shape
    strides = (length * heads * columns, columns, heads * columns, 1)
    return like.new_empty_strided(shape, strides, dtype=dtype)


def batch_row(x: Tensor) -> Tensor:
    """Packed `[total, H, D]` as kernels see it: one batch row, `[1, H, total, D]`."""
    return x.transpose(0, 1).unsqueeze(0)


def packed_rows(x: Tensor) -> Tensor:
    """The inverse of `batch_row` for a new tensor. Autograd does not see that the result is a view."""
    return x.squeeze(0).transpose(0, 1).data
