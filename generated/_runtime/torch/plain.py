# SPDX-License-Identifier: Apache-2.0
"""The plain reference in the place of an op's kernels: on the CPU, and for meta tensors, which have only shapes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey

_Results = TypeVar("_Results", bound=tuple[Tensor, ...])


def plain_forward(reference: Callable[..., Any], results: _Results, *arguments: Any) -> _Results:
    """Fill `results`, which the fake forward has allocated, with what the reference computes from the arguments.

    The reference does not compute the running sum of a log-decay, which only kernels read. It is filled with zeros, so
    that equal calls of the operator return equal values.
    """
    if not results[0].is_meta:
        computed = reference(*arguments)
        for result, x in zip(results, computed, strict=False):
            result.copy_(x)
        for result in results[len(computed) :]:
            result.zero_()
    return results


def plain_backward(
    reference: Callable[..., Any],
    results: _Results,
    do: Tensor,
    dlse: Tensor | None,
    trained: Sequence[int | None],
    whole: tuple[Tensor, Tensor] | None,
    *arguments: Any,
) -> _Results:
    """Fill `results`, which the fake backward has allocated, with the gradients of the reference.

    `trained` has for each result the place of its tensor among the arguments of the forward, or None if no gradient is
    wanted. `whole` is o and lse of more keys than the arguments have, if there are more: the gradients are then the
    part that comes from the keys of the arguments.
    """
    if do.is_meta:
        return results
    # A backward inside of an autocast region computes what one outside of it does.
    with recording_gradients(), torch.autocast(do.device.type, enabled=False):
        if whole is not None:
            # The reference's o has the dtype of q. In float32 neither o nor its gradient is rounded to 16 bits.
            q, *others = arguments
            arguments = (q.to(torch.promote_types(q.dtype, torch.float32)), *others)
        wide = {place: result.dtype for place, result in zip(trained, results, strict=True) if place is not None}
        leaves = {place: _leaf(arguments[place], dtype) for place, dtype in wide.items()}
        o, lse = reference(*(leaves.get(place, x) for place, x in enumerate(arguments)))
        if whole is None:
            o = o.to(do.dtype)
        else:
            do, dlse = of_part(do, dlse, whole, o.detach(), lse.detach())
        outputs, gradients = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
        # A packed call without any sequence computes nothing from its tensors.
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if o.requires_grad:
            found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
    filled = [result for result, place in zip(results, trained, strict=True) if place is not None]
    for result, x in zip(filled, found, strict=True):
        if x is None:
            result.zero_()
        else:
            result.copy_(x)
    return results


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a leaf of autograd, in the wider one of its dtype and `dtype`."""
    return x.detach().to(torch.promote_types(x.dtype, dtype)).requires_grad_()


def of_part(
    do: Tensor, dlse: Tensor | None, whole: tuple[Tensor, Tensor], o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of o and lse of some keys, in their dtype, from those of o and lse of all keys, `whole`.

    The probabilities of the part must be smaller by the factor `exp(lse - whole's lse)`. The number that each row
    subtracts from dp, `sum(o * do) - dlse`, must be that of the whole, times the same factor. o of the part is rounded
    like o of the whole, so that the rounding cancels if the part has all keys.
    """
    whole_o, whole_lse = whole
    # In a packed call lse is [H, total], o [total, H, D].
    per_row = (lambda x: x.t()) if o.dim() == 3 else (lambda x: x)
    share = torch.where(lse == float("-inf"), 0.0, torch.exp(lse - whole_lse))
    less = per_row(((o.to(whole_o.dtype).to(o.dtype) - whole_o) * do).sum(-1))
    dlse = less if dlse is None else less + dlse
    return do * per_row(share).unsqueeze(-1), share * dlse


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Make autograd record what is computed, even inside a custom operator, in which it is off."""
    guard = torch._C._SetExcludeDispatchKeyGuard
    autograd, views = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView
    with guard(autograd, False), guard(views, False), torch.enable_grad():
        yield
