"""Gradients of calls whose o and lse are known: their forward is not computed again.

A call over several ranks is made of calls of the op, and its backward has o and lse of the whole. Autograd records a
call of the op whose kernels are not launched, and which returns the known o and lse in their place; the backward then
starts from them. If o and lse are those of more keys than the call has, it gives the gradients of the call's part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .plain import recording_gradients
from .replay import give_known, take_known


def gradients_of(
    op: Callable[..., Any],
    arguments: Callable[..., tuple[Sequence[Tensor], dict[str, Any]]],
    leaves: Sequence[Tensor],
    known: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of a call's o and lse with respect to `leaves`, None for what it does not depend on.

    Args:
        arguments: makes q, k, v and the keywords of the call from the leaves, differentiably.
        known: o and lse of the rows, of all their keys; o as the op returns it in its layout "bhsd" or packed.
        given: the gradients with respect to o, in the layout of the call, and lse.
    """
    with recording_gradients():
        fresh = [x.detach().requires_grad_(x.is_floating_point()) for x in leaves]
        tensors, keywords = arguments(*fresh)
        give_known(known)
        try:
            o, lse = op(*tensors, **keywords, return_lse=True)
        finally:
            is_left = take_known() is not None
    assert not is_left, "the op ran no forward"
    do, dlse = given
    outputs = [(o, do)] if dlse is None else [(o, do), (lse, dlse)]
    wanted = [x for x in fresh if x.requires_grad]
    with recording_gradients():
        found = torch.autograd.grad(
            [x for x, _ in outputs], wanted, [x.to(y.dtype) for y, x in outputs], allow_unused=True
        )
    by_leaf = iter(found)
    return tuple(next(by_leaf) if x.requires_grad else None for x in fresh)
