"""What the layers of one forward share: which tokens are of one sequence, and the blocks that kernels visit."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .transformers_masks import AttentionMask

Cache = dict[Any, Any]

_KEPT = 4
"""Packings that are kept of calls without a mask, as those of vision towers."""

_recent: OrderedDict[Any, tuple[Tensor, Cache]] = OrderedDict()


def cache_of(mask: AttentionMask | None, cu_seqlens: Tensor | None) -> Cache | None:
    """Where the calls of one forward and mask kind keep what they share: with the mask, or else by the packing."""
    if torch.compiler.is_compiling():
        return None
    if mask is not None:
        return mask.cache
    if cu_seqlens is None or cu_seqlens.is_inference():
        return None
    place = identity(cu_seqlens)
    if place not in _recent:
        # The tensor is kept, so that no other gets its identity.
        _recent[place] = cu_seqlens, {}
        while len(_recent) > _KEPT:
            _recent.popitem(last=False)
    return _recent[place][1]


def identity(x: Any) -> tuple[int, int] | None:
    """What tells a tensor from others, and from what it was before it was written to, for as long as it is kept."""
    if not isinstance(x, Tensor):
        return None
    return id(x), 0 if x.is_inference() else x._version


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast makes of floats on a kind of device, None if it is off there."""
    # The first of these costs next to nothing, and knows every kind.
    is_on = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def schedule(op: Any, found: Cache, module: Any, q: Tensor, k: Tensor, v: Tensor, arguments: Mapping[str, Any]) -> Any:
    """The blocks that a call visits, found by the first layer that makes it."""
    backward = torch.is_grad_enabled() or bool(module.training)
    given = {name: x for name, x in arguments.items() if name in _parameters(op)}
    said = tuple((name, identity(x) if isinstance(x, Tensor) else x) for name, x in given.items())
    cast = autocast_dtype(q.device.type)
    place = (op, q.shape, k.shape, v.shape, q.dtype, q.device, cast, backward, said)
    if place not in found:
        # The arguments are kept, so that no other tensors get their identities.
        found[place] = op.schedule(q, k, v, backward=backward, **given), given
    return found[place][0]


@cache
def _parameters(op: Any) -> frozenset[str]:
    return frozenset(inspect.signature(op.schedule).parameters)
