# SPDX-License-Identifier: Apache-2.0
"""Calls over several ranks outside of a trace: an autograd function without the custom operators' costs.

For the backward the tensors that a rank received in the forward may be saved in place of q, k, v, o and lse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plans import bare_apply
from ..transforms import refuse_second_derivative
from .exchange import kept


def attend(parallel: Any, given: Mapping[str, Any], *, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Call a `ContextParallel` with its arguments: o, and lse if it is wanted."""
    names = [name for name, x in given.items() if isinstance(x, Tensor)]
    if not (torch.is_grad_enabled() and any(given[name].requires_grad for name in names)):
        o, lse, _ = parallel.computed(given, wants_lse=wants_lse)
        return o, lse if wants_lse else None
    others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    tensors = [given[name] for name in names]
    found = bare_apply(_Attend)(parallel, names, others, wants_lse, *tensors, bare_apply(_Edge)(*tensors))
    return found if wants_lse else (found, None)


class _Edge(torch.autograd.Function):
    """A tensor without elements that depends on other tensors, but does not keep their memory alive."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.count


class _Attend(torch.autograd.Function):
    """o, and lse if it is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        parallel: Any,
        names: Sequence[str],
        others: Mapping[str, Any],
        wants_lse: bool,
        *inputs: Tensor,
    ) -> Any:
        *tensors, edge = inputs
        given = dict(zip(names, tensors, strict=True))
        o, lse, kept = parallel.computed({**given, **others}, wants_lse=wants_lse)
        ctx.parallel, ctx.names, ctx.others = parallel, names, others
        ctx.shapes = {name: given[name].shape for name in ("q", "k", "v")}
        ctx.dtype, ctx.device = given["q"].dtype, given["q"].device
        ctx.keeps = bool(kept)
        if kept:
            own = [x for name, x in given.items() if name not in ctx.shapes]
            # A view of o would refer to o, which refers to this node: without a backward neither would ever be freed.
            ctx.save_for_backward(edge, *own, *(x.detach() for x in kept))
        else:
            ctx.save_for_backward(edge, *tensors, o, lse)
        ctx.set_materialize_grads(False)
        return (o, lse) if wants_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        parallel, names, (edge, *saved) = ctx.parallel, ctx.names, ctx.saved_tensors
        needs = ctx.needs_input_grad[4:-1]
        wanted = [name for name, is_wanted in zip(names, needs, strict=True) if is_wanted]
        results, kept = None, ()
        if ctx.keeps:
            given = {name: _nothing(parallel, shape, ctx.dtype, ctx.device) for name, shape in ctx.shapes.items()}
            own = [name for name in names if name not in given]
            given |= dict(zip(own, saved[: len(own)], strict=True))
            kept = saved[len(own) :]
        else:
            given = dict(zip(names, saved[:-2], strict=True))
            results = saved[-2], saved[-1]
        if do is None:
            shape = (*ctx.shapes["q"][:-1], ctx.shapes["v"][-1])
            do = torch.zeros(shape, dtype=ctx.dtype, device=ctx.device)
        found = parallel.derived({**given, **ctx.others}, results, (do, dlse), wanted, kept)
        if torch.is_grad_enabled():
            found = dict(zip(wanted, _Refused.apply(edge, *(found[name] for name in wanted)), strict=True))
        return None, None, None, None, *(found.get(name) for name in names), None


def _nothing(parallel: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A placeholder for q, k or v, of which only the shape is read."""
    key = ("nothing", shape, dtype, device)
    found: Tensor = kept(parallel.layout, key, lambda: torch.empty((), dtype=dtype, device=device).expand(shape))
    return found


class _Refused(torch.autograd.Function):
    """Gradients that are computed already, and that cannot be differentiated."""

    @staticmethod
    def forward(_ctx: Any, _edge: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        refuse_second_derivative("context_parallel")
