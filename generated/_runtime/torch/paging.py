# SPDX-License-Identifier: Apache-2.0
"""`append` of `generated.paging` for torch: one kernel, or on the CPU an assignment."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.configs import next_power_of_2
from ..core.paged import check_divisor, check_divisors, check_last_slot, check_token_scale
from ..core.sequences import refuse_nested
from .devices import interprets
from .dispatch import launches_directly, runs_reference, values_are_checked
from .dtypes import as_integers
from .launching import launch
from .operators import register_writer
from .strides import begin_alike, check_apart

_OP = "append"


def append(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slots: Tensor, k_scale: Any, v_scale: Any
) -> tuple[Tensor | None, ...]:
    """Write k and v, checked, to their slots of the caches, in place. Scales by token are computed and written, too."""
    given = (("k_scale", k_scale, k_cache), ("v_scale", v_scale, v_cache))
    scales = [None if cache is None else _scale(name, scale, cache) for name, scale, cache in given]
    if v_cache is not None and k_scale is not None and not isinstance(k_scale, Tensor) and k_scale == v_scale:
        # Values inside keys need the scale of the keys, not an equal one: no call compares tensors on a GPU.
        scales[1] = scales[0]
    passed: tuple[Any, ...] = (k, v, k_cache, v_cache, slots, *scales)
    (_append if launches_directly(*passed) else _append_operator)(*passed)
    return k_cache, v_cache, *(scale for scale in scales if scale is not None and scale.dim() == 3)


def _append(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    caches = {name: x for name, x in (("k_cache", k_cache), ("v_cache", v_cache)) if x is not None}
    for name, x in (("v", v), *caches.items(), ("slots", slots)):
        if x is not None and x.device != k.device:
            fail(_OP, name, f"device {k.device}, that of k", x.device)
    for name, x in caches.items():
        if x.requires_grad:
            fail(_OP, name, "a tensor without gradient: it is changed in place", "one that requires grad")
        check_apart(_OP, name, x)
    slots = as_integers(_OP, "slots", slots)
    _check_slots(slots, k_cache)
    if slots.numel() == 0:
        return
    memory = {x.untyped_storage().data_ptr() for x in caches.values()}
    new = [(_read_first(k.detach(), memory), k_cache, k_scale)]
    if v is not None and v_cache is not None:
        if v_cache.shape[3] <= k_cache.shape[3] and begin_alike(k_cache, v_cache):
            _check_part(k, v, k_scale, v_scale)
        else:
            new.append((_read_first(v.detach(), memory), v_cache, v_scale))
    for x, cache, scale in new:
        # Triton's interpreter rounds to 8-bit floats wrongly: a mantissa that overflows does not raise the exponent.
        if runs_reference(k) or (interprets(k) and cache.dtype.itemsize == 1):
            _assign(x, cache, slots, scale)
        else:
            _launch(x, cache, slots, scale)


_append_operator = register_writer(__name__, _OP, _append, ("k_cache", "v_cache", "k_scale", "v_scale"))


def _read_first(x: Tensor, memory: set[int]) -> Tensor:
    """`x`, or a copy if it lies in a cache, whose slots are written while others are read."""
    return x.clone() if x.untyped_storage().data_ptr() in memory else x


def _check_part(k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Check values that are columns of the keys, in the new tokens as in the cache."""
    expected = "that of the keys, because v_cache is a view of k_cache"
    if (k_scale is None) != (v_scale is None):
        fail(_OP, "v_scale", expected, "only one of both scales")
    if k_scale is not None and v_scale is not None:
        is_same = begin_alike(k_scale, v_scale) and k_scale.shape == v_scale.shape
        if not is_same and not (k_scale.dim() < 3 and values_are_checked(k_scale) and torch.equal(k_scale, v_scale)):
            fail(_OP, "v_scale", expected, "another one")
    if values_are_checked(k) and not torch.equal(v, k[..., : v.shape[2]]):
        fail(_OP, "v", "the first columns of k, because v_cache is a view of k_cache", "other values")


def _check_slots(slots: Tensor, cache: Tensor) -> None:
    """Refuse slots behind the last, if values are checked."""
    if slots.numel() > 0 and values_are_checked(slots):
        check_last_slot(int(slots.max()), cache.shape[0], cache.shape[1])


def _scale(name: str, scale: Any, cache: Tensor) -> Tensor | None:
    """A scale as one float for each head; scales by token are returned as they are."""
    heads, device = cache.shape[2], cache.device
    if scale is None:
        return None
    refuse_nested(_OP, name, scale)
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
        x = x.float().clamp(-most, most)
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
        (*x.stride(), *cache.stride(), heads, cache.shape[1], cache.shape[0] * cache.shape[1]),
        TOKEN_SCALES=scale is not None and scale.dim() == 3,
        MOST=torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0,
        HEAD_DIM=dim,
        HEADS=next_power_of_2(heads),
        COLUMNS=next_power_of_2(dim),
        num_warps=4,
    )
