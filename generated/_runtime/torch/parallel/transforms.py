# SPDX-License-Identifier: Apache-2.0
"""Calls over several ranks under `torch.func.grad`, `vjp`, `jacrev` and `vmap`.

torch.func unwraps tensors before it runs the forward of an autograd function, so checks and collectives get plain ones.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..replay import apply
from ..transforms import one_by_one, refuse_second_derivative, refuse_tangents


def attend(parallel: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """o and lse of a call of a `ContextParallel`."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    refuse_tangents(parallel.__name__, **tensors)
    others = {name: x for name, x in given.items() if name not in tensors}
    o, lse = apply(_Attend, parallel, tuple(tensors), others, *tensors.values())
    return o, lse


class _Attend(torch.autograd.Function):
    """o and lse."""

    @staticmethod
    def forward(parallel: Any, names: Sequence[str], others: Mapping[str, Any], *tensors: Tensor) -> Any:
        given = {**dict(zip(names, tensors, strict=True)), **others}
        parallel.checked(given)
        o, lse, _ = parallel.computed(given, wants_lse=True)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        ctx.parallel, ctx.names, ctx.others, *tensors = inputs
        ctx.save_for_backward(*tensors, *outputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        names, needs = ctx.names, ctx.needs_input_grad[3:]
        wanted = tuple(name for name, is_wanted in zip(names, needs, strict=True) if is_wanted)
        do = torch.zeros_like(o) if do is None else do
        found = apply(_Gradients, ctx.parallel, names, ctx.others, wanted, do, dlse, o, lse, *tensors)
        by_name = dict(zip(wanted, found, strict=True))
        return None, None, None, *(by_name.get(name) for name in names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(partial(apply, _Attend), info.batch_size, in_dims, args)


class _Gradients(torch.autograd.Function):
    """The gradients of `_Attend`, which have none of their own."""

    @staticmethod
    def forward(
        parallel: Any,
        names: Sequence[str],
        others: Mapping[str, Any],
        wanted: Sequence[str],
        do: Tensor,
        dlse: Tensor | None,
        o: Tensor,
        lse: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given = {**dict(zip(names, tensors, strict=True)), **others}
        found = parallel.derived(given, (o, lse), (do, dlse), list(wanted))
        return tuple(found[name] for name in wanted)

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        refuse_second_derivative("context_parallel")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(partial(apply, _Gradients), info.batch_size, in_dims, args)
