# SPDX-License-Identifier: Apache-2.0
"""Calls of float8_e4m3fn in PyTorch: q, k and v are 8-bit floats, each with a scale for each head."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_factor, fail
from ..core.fp8 import FP8, check_ends_of_scale, check_head_dims, check_no_scales, check_takes_fp8, scale_text
from ..core.sequences import refuse_nested
from .backward import Run
from .dispatch import values_are_checked
from .dtypes import FP8_DTYPE
from .replay import apply


def scaled_run(
    op: str, q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, cu_seqlens_q: Any, layout: str
) -> Run:
    """The function that runs a call without pages: `apply`, or if q is float8_e4m3fn one that has only a forward.

    A scale is a number, floats `[H]` or one for each batch row or packed sequence, `[B, H]`.
    """
    if not isinstance(q, Tensor) or q.dtype != FP8_DTYPE:
        if q_scale is not None or k_scale is not None or v_scale is not None:
            dtype = str(getattr(q, "dtype", type(q).__name__)).removeprefix("torch.")
            check_no_scales(op, dtype, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return apply
    check_takes_fp8(op)
    rows = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    axis = 1 if q.dim() == 3 or layout == "bhsd" else 2
    scales = []
    for name, x, scale in (("q", q, q_scale), ("k", k, k_scale), ("v", v, v_scale)):
        if not isinstance(x, Tensor) or x.dtype != FP8_DTYPE:
            fail(op, name, f"dtype torch.{FP8}, that of q", getattr(x, "dtype", type(x).__name__))
        if x.dim() > 0:
            check_head_dims(op, **{name: x.shape[-1]})
        scales.append(_scale(op, f"{name}_scale", scale, rows, x.shape[axis] if x.dim() > axis else 0, x))
    return partial(_run, (scales[0], scales[1], scales[2]))


def _scale(op: str, name: str, scale: Any, rows: int, heads: int, x: Tensor) -> Tensor:
    """A scale as float32 `[rows, heads]`, checked."""
    expected = scale_text(rows, heads, f" on {x.device}")
    refuse_nested(op, name, scale)
    if isinstance(scale, Tensor) and scale.dim() == 0 and scale.device == x.device:
        scale = scale.expand(heads)
    if not isinstance(scale, Tensor):
        if scale is None:
            fail(op, name, expected, "None")
        number = check_factor(op, name, scale)
        return torch.full((rows, heads), number, dtype=torch.float32, device=x.device)
    if scale.shape not in ((heads,), (rows, heads)) or not scale.dtype.is_floating_point or scale.device != x.device:
        fail(op, name, expected, f"{scale.dtype} {list(scale.shape)} on {scale.device}")
    if torch.is_grad_enabled() and scale.requires_grad:
        fail(op, name, "a tensor without gradient", "one that requires grad")
    if scale.numel() > 0 and values_are_checked(scale):
        least, most = scale.aminmax()
        check_ends_of_scale(op, name, least.item(), most.item())
    return scale.float().expand(rows, heads).contiguous()


def _run(scales: tuple[Tensor, Tensor, Tensor], function: Any, *args: Any) -> tuple[Tensor, ...]:
    """Compute o and lse of a call, in place of `apply`. They have no gradient."""
    found: tuple[Tensor, ...] = function.scaled(*args, *scales)
    return found
