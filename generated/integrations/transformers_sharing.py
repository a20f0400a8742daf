# SPDX-License-Identifier: Apache-2.0
"""What the layers of one forward share: the sequence of each token, and the schedules of blocks that kernels visit."""

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
"""How many packings are cached for calls without a mask, such as those of vision towers."""

_recent: OrderedDict[Any, tuple[Tensor, Cache]] = OrderedDict()


def cache_of(mask: AttentionMask | None, cu_seqlens: Tensor | None) -> Cache | None:
    """The cache that the calls of one forward and one mask share: the mask's own, or without a mask that of a packing.

    It is None in a trace, and if the call has neither a mask nor a packing whose tensor counts its versions.
    """
    if torch.compiler.is_compiling():
        return None
    if mask is not None:
        return mask.cache
    if cu_seqlens is None or cu_seqlens.is_inference():
        return None
    place = identity(cu_seqlens)
    if place not in _recent:
        # The tensor is kept, so that no other tensor gets its identity.
        _recent[place] = cu_seqlens, {}
        while len(_recent) > _KEPT:
            _recent.popitem(last=False)
    return _recent[place][1]


def identity(x: Any) -> tuple[int, int] | None:
    """A tensor's id and version counter: while the tensor is kept alive, they identify it and its contents."""
    if not isinstance(x, Tensor):
        return None
    return id(x), 0 if x.is_inference() else x._version


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype that autocast casts floats to on a kind of device; None if autocast is off there."""
    # The first check is very cheap, and covers every kind of device.
    is_on = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def schedule(op: Any, found: Cache, module: Any, q: Tensor, k: Tensor, v: Tensor, arguments: Mapping[str, Any]) -> Any:
    """The schedule of the blocks that a call visits, computed by the first layer with such a call and then reused."""
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
