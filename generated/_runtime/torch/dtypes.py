# SPDX-License-Identifier: Apache-2.0
"""Dtypes of tensors, and casts to those that kernels read."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.sequences import refuse_nested
from ..core.settings import INTERPRET
from .dispatch import values_are_checked

FP32 = torch.float32
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of q, k and v besides 8-bit floats."""
FP8_DTYPE = torch.float8_e4m3fn


def in_dtype(op: str, name: str, x: Tensor, dtypes: tuple[str, ...]) -> Tensor:
    """A tensor, cast to one of the dtypes that the kernels read if need be; its gradient has its own dtype."""
    if DTYPE_NAMES.get(x.dtype) in dtypes:
        return x
    dtype = _DTYPES[dtypes[-1]]
    if dtype.is_floating_point:
        if not x.dtype.is_floating_point:
            fail(op, name, "a floating-point dtype", x.dtype)
        return x.to(dtype)
    if dtype == torch.bool:
        fail(op, name, "dtype torch.bool", x.dtype)
    return as_integers(op, name, x, dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of integers; bool is not."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def is_distributed(x: Any) -> bool:
    """Whether an argument is a DTensor."""
    return type(x) is not Tensor and isinstance(x, Tensor) and hasattr(x, "device_mesh")


def check_strided(op: str, name: str, x: Any) -> None:
    """Check that an argument is a local tensor with strides: no DTensor, and no nested tensor."""
    if not isinstance(x, Tensor):
        fail(op, name, "a torch.Tensor", type(x).__name__)
    if is_distributed(x):
        expected = "a local tensor: pass `x.to_local()`, or use `context_parallel`, which takes DTensors"
        fail(op, name, expected, "a DTensor")
    refuse_nested(op, name, x)
    if x.layout != torch.strided:
        fail(op, name, f"layout {torch.strided}", x.layout)


def as_integers(op: str, name: str, x: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor of integers of any dtype, in the one that the kernels read.

    A value that does not fit is an error on a CPU and in debug mode. Otherwise values are not read, because reading
    them waits for the device.
    """
    check_strided(op, name, x)
    if x.dtype == dtype:
        return x
    if not is_integer(x.dtype):
        fail(op, name, f"dtype {dtype} or another of integers", x.dtype)
    cast = x.to(dtype)
    if x.dtype.itemsize >= dtype.itemsize and values_are_checked(x):
        lost = x[(cast.to(x.dtype) != x) | ((cast < 0) & (not x.dtype.is_signed))]
        if lost.numel() > 0:
            fail(op, name, f"values that {dtype} holds", lost[0].item())
    return cast


def is_autocast(q: Tensor) -> bool:
    """True if autocast is on, so that q, k and v are cast to its dtype."""
    return q.dtype != FP8_DTYPE and not q.is_meta and torch.is_autocast_enabled(q.device.type)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to autocast's dtype where it is on, as scaled_dot_product_attention does."""
    if is_autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def result_dtype(q: Tensor) -> torch.dtype:
    """The dtype of o: that of q, or bfloat16 if q has 8-bit floats."""
    return torch.bfloat16 if q.dtype == FP8_DTYPE else q.dtype


def interpreter_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Triton's interpreter computes bfloat16 wrongly; there the kernels run on float32 copies."""
    if INTERPRET and q.dtype == torch.bfloat16:
        return q.float(), k.float(), v.float()
    return q, k, v
