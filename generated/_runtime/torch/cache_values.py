# SPDX-License-Identifier: Apache-2.0
"""What the caches of a paged call hold: 8-bit floats and their scales."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_factor, fail, host_number
from ..core.paged import FP8, CacheCall, check_factors, check_scale_given, score_factor
from ..core.paged_calls import check_converts, check_scale_array
from ..core.sequences import refuse_nested
from .dispatch import values_are_checked
from .transforms import refuse_tangents

FP8_DTYPES = tuple(getattr(torch, name) for name in FP8)


def with_scales(op: str, call: CacheCall, k_scale: Any, v_scale: Any) -> CacheCall:
    """The call with the scales by which the numbers in its caches are multiplied, checked.

    A scale is a number, floats `[Hkv]` or `[pages, page size, Hkv]`, or None. A number for the keys becomes a factor of
    the call's scale.
    """
    if k_scale is None and v_scale is None and call.k.dtype == call.v.dtype == call.q.dtype:
        return call
    for name, x in (("k", call.k), ("v", call.v)):
        if x.is_cuda and torch.version.hip is None:
            check_converts(op, name, _name(x.dtype), _capability(x.device))
    (k_number, k_scale), (v_number, v_scale) = (
        _scale(op, name, scale, x) for name, scale, x in (("k_scale", k_scale, call.k), ("v_scale", v_scale, call.v))
    )
    return call._replace(scale=score_factor(call.scale, k_number), k_scale=k_scale, v_scale=v_scale, v_factor=v_number)


def _scale(op: str, name: str, scale: Any, x: Tensor) -> tuple[float, Tensor | None]:
    """The checked scale of the cache `x`, as a number and a tensor: 1 and the tensor, or the number and None."""
    check_scale_given(op, name, scale, _name(x.dtype))
    if isinstance(scale, Tensor) and scale.dim() == 0 and scale.device.type == "cpu":
        scale = host_number(op, name, scale)
    if scale is None or not isinstance(scale, Tensor):
        return 1.0 if scale is None else check_factor(op, name, scale), None
    refuse_nested(op, name, scale)
    heads = x.shape[2]
    if scale.dim() == 0:
        scale = scale.expand(heads)
    fits = scale.dtype.is_floating_point and scale.device == x.device
    got = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
    check_scale_array(op, name, scale.shape, x.shape, fits=fits, where=f" on {x.device}", got=got)
    refuse_tangents(op, **{name: scale})
    if torch.is_grad_enabled() and scale.requires_grad:
        fail(op, name, "a tensor without gradient", "one that requires grad")
    if scale.dim() == 1 and values_are_checked(scale):
        check_factors(op, name, scale.tolist())
    return 1.0, scale.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def dequantised(x: Tensor, scale: Tensor | None, factor: float, page: Tensor, slot: Tensor) -> Tensor:
    """Tokens of a cache, `[tokens, Hkv, D]`, times its scale and a number."""
    found = x[page, slot]
    if x.dtype in FP8_DTYPES or scale is not None or factor != 1.0:
        found = found.float() * factor
    if scale is not None:
        found *= (scale[page, slot] if scale.dim() == 3 else scale)[..., None].float()
    return found
