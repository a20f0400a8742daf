"""The floating-point operations of calls, as `torch.utils.flop_counter.FlopCounterMode` adds them up.

PyTorch counts those of its own attention for every pair of a query and a key, whether a mask keeps it or not, and so
does this module. The backward computes the scores again: five products for the forward's two.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Count = Callable[[Mapping[str, Any]], int]
"""The operations of a call, from the arguments of its operator by name."""


def register_flops(operator: str, parameters: Sequence[str], count: Count) -> None:
    """Let PyTorch count the operations of a custom operator, `namespace::name`, with these parameters."""
    # An op has imported Triton by now, which takes most of this module's time.
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:  # noqa: ARG001  # PyTorch passes the results
        return count(dict(zip(parameters, args, strict=False)) | kwargs)

    namespace, _, name = operator.partition("::")
    found = getattr(getattr(torch.ops, namespace), name)
    # A package that is imported again registers its operators again.
    flop_registry.pop(found, None)
    register_flop_formula(found, get_raw=True)(counted)
    # A counter copies the registry when it is made. The op may be imported by the first call that it counts.
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry[found] = counted


def of_forward(call: Mapping[str, Any]) -> int:
    """The operations of a forward."""
    return forward_flops(_pairs(call), call["q"], call["v"])


def of_backward(call: Mapping[str, Any]) -> int:
    """The operations of a backward."""
    return backward_flops(_pairs(call), call["q"], call["v"])


def forward_flops(pairs: int, q: Tensor, v: Tensor) -> int:
    """The operations of a forward of so many pairs of a row of q and a key: q k^T, and the weights times v."""
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def backward_flops(pairs: int, q: Tensor, v: Tensor) -> int:
    """Those of a backward: the scores again, dq and dk; the gradient of the weights, and dv."""
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(call: Mapping[str, Any]) -> int:
    """Pairs of a query and a key of the same sequence, for all query heads. q and k are `[B, H, S, D]`, of packed
    sequences `[total, H, D]`; cached keys have shapes of their own."""
    q: Tensor = call["q"]
    k: Tensor = call["k"]
    offsets: Tensor | None = call.get("cu_seqlens_q")
    heads = q.shape[1]
    if "page_table" in call:
        return heads * _pairs_of_caches(call, offsets)
    if offsets is None:
        return q.shape[0] * heads * q.shape[2] * k.shape[2]
    lengths, key_lengths = _lengths(offsets), _lengths(call["cu_seqlens_k"])
    if lengths is None or key_lengths is None:  # as many sequences of equal length
        return heads * (q.shape[0] * k.shape[0] // max(offsets.shape[0] - 1, 1))
    return heads * sum(rows * keys for rows, keys in zip(lengths, key_lengths, strict=True))


def _pairs_of_caches(call: Mapping[str, Any], offsets: Tensor | None) -> int:
    """Pairs of a row and a cached key; each sequence has as many keys as it may have, unless its length can be read."""
    q: Tensor = call["q"]
    kv_lengths: Tensor | None = call["kv_lengths"]
    most: int = call["most_keys"]
    if kv_lengths is None or not _is_readable(kv_lengths):
        return most * (q.shape[0] if offsets is not None else q.shape[0] * q.shape[2])
    keys: list[int] = [min(max(length, 0), most) for length in kv_lengths.tolist()]  # which calls no operator
    rows = [q.shape[2]] * len(keys) if offsets is None else _lengths(offsets)
    if rows is None:
        return sum(keys) * q.shape[0] // max(len(keys), 1)
    return sum(x * y for x, y in zip(rows, keys, strict=True))


def _lengths(offsets: Tensor) -> list[int] | None:
    """The lengths between offsets, None if they have no values: of a fake or a meta tensor only the shape is known."""
    return [end - begin for begin, end in pairwise(offsets.tolist())] if _is_readable(offsets) else None


def _is_readable(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(x)
