# SPDX-License-Identifier: Apache-2.0
"""`append` of `generated.paging` for torch: one kernel, or on the CPU an assignment."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.configs import next_power_of_2
from ..core.paged import check_divisor, check_divisors, check_last_slot, check_token_scale
from .devices import interprets
from .dispatch import runs_reference, values_are_checked
from .dtypes import as_integers
from .launching import launch
from .strides import check_apart

_OP = "append"


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Any, v_scale: Any
) -> tuple[Tensor, ...]:
    """Write k and v, checked, to their slots of the caches, in place. Scales by token are computed and written, too."""
    for name, x in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slots", slots)):
        if x.device != k.device:
            fail(_OP, name, f"device {k.device}, that of k", x.device)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.requires_grad:
            fail(_OP, name, "a tensor without gradient: it is changed in place", "one that requires grad")
        check_apart(_OP, name, x)
    given = (("k_scale", k_scale, k_cache), ("v_scale", v_scale, v_cache))
    scales = [_scale(name, scale, cache) for name, scale, cache in given]
    written = [scale for scale in scales if scale is not None and scale.dim() == 3]
    slots = as_integers(_OP, "slots", slots)
    _check_slots(slots, k_cache)
    if slots.numel() == 0:
        return k_cache, v_cache, *written
    for x, cache, scale in ((k.detach(), k_cache, scales[0]), (v.detach(), v_cache, scales[1])):
        # Triton's interpreter rounds to 8-bit floats wrongly: a mantissa that overflows does not raise the exponent.
        if runs_reference(k) or (interprets(k) and cache.dtype.itemsize == 1):
            _assign(x, cache, slots, scale)
        else:
            _launch(x, cache, slots, scale)
    return k_cache, v_cache, *written


def _check_slots(slots: Tensor, cache: Tensor) -> None:
    """Refuse slots behind the last, if values are checked."""
    if slots.numel() > 0 and values_are_checked(slots):
        check_last_slot(int(slots.max()), cache.shape[0], cache.shape[1])


def _scale(name: str, scale: Any, cache: Tensor) -> Tensor | None:
    """A scale as one float for each head; scales by token are returned as they are."""
    heads, device = cache.shape[2], cache.device
    if scale is None:
        return None
    if isinstance(scale, Tensor) and scale.dim() == 3:
        check_token_scale(name, tuple(scale.shape), tuple(cache.shape), cache.dtype.itemsize)
        if scale.dtype != torch.float32 or scale.device != device or not scale.is_contiguous():
            got = f"{scale.dtype}, strides {list(scale.stride())} on {scale.device}"
            fail(_OP, name, f"dense float32 on {device} beside a cache, as it is written", got)
        if scale.requires_grad:
            fail(_OP, name, "a tensor without gradient: it is changed in place", "one that requires grad")
        return scale
    if not isinstance(scale, Tensor):
        return torch.full((heads,), check_divisor(name, scale), dtype=torch.float32, device=device)
    if scale.shape not in ((), (heads,)) or not scale.dtype.is_floating_point or scale.device != device:
        fail(
            _OP,
            name,
            f"a number or floats [{heads}] on {device}",
            f"{scale.dtype} {list(scale.shape)} on {scale.device}",
        )
    if values_are_checked(scale):
        check_divisors(name, scale.reshape(-1).tolist())
    return scale.float().expand(heads).contiguous()


def _limited(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that an 8-bit float does not hold become the largest that it does, as in the kernel."""
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)


def _assign(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    wanted = slots >= 0
    places = slots[wanted].long()
    values = x[wanted].float()
    size = cache.shape[1]
    if scale is not None and scale.dim() == 3:
        own = values.abs().amax(-1) / torch.finfo(cache.dtype).max
        scale[places // size, places % size] = own = torch.where(own == 0.0, 1.0, own)
        values = values / own[..., None]
    elif scale is not None:
        values = values / scale[:, None]
    cache[places // size, places % size] = _limited(values if scale is not None else x[wanted], cache.dtype)


def _launch(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    from ..device.append import append_tokens

    tokens, heads, dim = x.shape
    launch(
        append_tokens,
        (tokens,),
        (x, slots, scale, cache),
        (*x.stride(), *cache.stride(), heads, cache.shape[1]),
        TOKEN_SCALES=scale is not None and scale.dim() == 3,
        MOST=torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0,
        HEAD_DIM=dim,
        HEADS=next_power_of_2(heads),
        COLUMNS=next_power_of_2(dim),
        num_warps=4,
    )
