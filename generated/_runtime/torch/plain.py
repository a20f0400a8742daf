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
    """Fill what a forward returns, as its fake one allocates it, with what the reference computes of its arguments."""
    if not results[0].is_meta:
        for result, x in zip(results, reference(*arguments), strict=False):
            result.copy_(x)
    return results


def plain_backward(
    reference: Callable[..., Any],
    results: _Results,
    do: Tensor,
    dlse: Tensor | None,
    trained: Sequence[int | None],
    *arguments: Any,
) -> _Results:
    """Fill what a backward returns, as its fake one allocates it, with the gradients of the reference.

    `trained` are the places of their tensors among the arguments of the forward; None where no gradient is wanted.
    """
    if do.is_meta:
        return results
    with _recording_gradients():
        leaves = {place: arguments[place].detach().requires_grad_() for place in trained if place is not None}
        o, lse = reference(*(leaves.get(place, x) for place, x in enumerate(arguments)))
        outputs, gradients = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
    filled = [result for result, place in zip(results, trained, strict=True) if place is not None]
    for result, x in zip(filled, found, strict=True):
        if x is None:
            result.zero_()
        else:
            result.copy_(x)
    return results


@contextmanager
def _recording_gradients() -> Iterator[None]:
    """Autograd records what is computed, also inside a custom operator, which it is kept out of."""
    guard = torch._C._SetExcludeDispatchKeyGuard
    autograd, views = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView
    with guard(autograd, False), guard(views, False), torch.enable_grad():
        yield
