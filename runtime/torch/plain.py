"""The plain reference in the place of an op's kernels: on the CPU, and for meta tensors, which have only shapes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey

_Results = TypeVar("_Results", bound=tuple[Tensor, ...])


def plain_forward(reference: Callable[..., Any], results: _Results, *arguments: Any) -> _Results:
    """Fill what a forward returns, as its fake one allocates it, with what the reference computes of its arguments."""
    if not results[0].is_meta:
        for result, x in zip(results, reference(*arguments), strict=False):
            result.copy_(x)
    return results


def plain_backward(
    reference: Callable[..., Any],
    results: _Results,
    saved: tuple[Tensor, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    trained: Sequence[int | None],
    *arguments: Any,
) -> _Results:
    """Fill what a backward returns, as its fake one allocates it, with the gradients of the reference.

    `saved` are o and lse of the rows. As for the kernels, they may be those of more keys than the call has.
    `trained` are the places of their tensors among the arguments of the forward; None where no gradient is wanted.
    """
    if do.is_meta:
        return results
    with recording_gradients():
        leaves = {place: arguments[place].detach().requires_grad_() for place in trained if place is not None}
        o, lse = reference(*(leaves.get(place, x) for place, x in enumerate(arguments)))
        gradients = _of_part(o.detach(), lse.detach(), saved, do, dlse)
        found = torch.autograd.grad([o, lse], list(leaves.values()), gradients, allow_unused=True)
    filled = [result for result, place in zip(results, trained, strict=True) if place is not None]
    for result, x in zip(filled, found, strict=True):
        if x is None:
            result.zero_()
        else:
            result.copy_(x)
    return results


def _of_part(
    o: Tensor, lse: Tensor, saved: tuple[Tensor, Tensor], do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of o and lse over the keys of a call, of which `saved` are those over all keys of its rows."""
    whole_o, whole_lse = saved
    # lse is [B, H, rows] beside o [B, H, rows, D], or packed [H, rows] beside [rows, H, D].
    packed = lse.dim() == 2
    share = torch.where(lse == whole_lse, 1.0, torch.exp(lse - whole_lse))
    per_row = share.t() if packed else share
    wide = do.to(share.dtype)
    change = (wide * (o.to(share.dtype) - whole_o.to(share.dtype))).sum(-1)
    change = change.t() if packed else change
    of_lse = change if dlse is None else change + dlse
    return (wide * per_row.unsqueeze(-1)).to(o.dtype), (share * of_lse).to(lse.dtype)


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Autograd records what is computed, also inside a custom operator, which it is kept out of."""
    guard = torch._C._SetExcludeDispatchKeyGuard
    autograd, views = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView
    with guard(autograd, False), guard(views, False), torch.enable_grad():
        yield
