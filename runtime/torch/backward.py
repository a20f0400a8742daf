"""The backward of an op by itself, for a call whose o and lse are known, such as those merged from several calls.

dk and dv are float32: they may be terms of a sum over calls or ranks, and only the sum should be rounded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core.backward_calls import BackwardEntry, shown_as
from ..core.checks import check_flag, fail
from .dtypes import FP8_DTYPE, check_strided
from .replay import replayed

Run: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Runs the kernels of a call: `apply`, or a `_Run`, which computes gradients in its place."""


class Gradients(NamedTuple):
    """Gradients of a call.

    Attributes:
        dq: in the layout and dtype of q, or float32. dk, dv: in the layouts of k and v, float32.
        own: gradients of the variant's own tensors by keyword, including those of a sink and a log-decay.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    own: dict[str, Tensor]


def give_backward(op: Any, call: Callable[..., Any]) -> None:
    """Give an op its `backward`. `call(run, ...)` computes the op; it takes all parameters except those of pages."""
    entry = BackwardEntry(op, call)

    def of_inputs(*args: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        return _backward(entry, *args, **keywords)[:3]

    replays = replayed(of_inputs)

    def backward(*args: Any, **keywords: Any) -> Gradients:
        """`_backward`, replayed like the op if autograd is off and no gradients of the variant's tensors are wanted."""
        wanted = keywords.get("wanted")
        if torch.is_grad_enabled() or not isinstance(wanted, tuple) or wanted:
            return _backward(entry, *args, **keywords)
        dq, dk, dv = replays(*args, **keywords)
        return Gradients(dq, dk, dv, {})

    op.__dict__["backward"] = shown_as(backward, _backward, op)


def _backward(
    entry: BackwardEntry,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    wanted: Sequence[str] | None = None,
    wide_dq: bool = False,
    **keywords: Any,
) -> Gradients:
    """The gradients of `op(q, k, v, return_lse=True, **keywords)`, whose results were o and lse.

    Only the probabilities are computed again. o and lse may come from more keys than k has: dk and dv are then the
    whole gradients of the keys in k, and dq is the part that comes from these keys. The gradient of a log-decay is
    correct only if k has all keys of a row. Autograd records nothing of this.

    Args:
        do: gradient of o.
        q: as the op takes it.
        k: as the op takes it.
        v: as the op takes it.
        o: as the op returned it, or merged from several calls.
        lse: as the op returned it, or merged from several calls.
        dlse: gradient of lse, float32, or None.
        wanted: keywords of the variant's own tensors whose gradients are wanted; None: all that have one.
        wide_dq: dq is float32, too.
        **keywords: those of the op, except those of pages.

    Raises:
        ArgumentError: a bad argument.
    """
    if isinstance(q, Tensor) and q.dtype == FP8_DTYPE:
        fail(entry.op, "q", f"a dtype with gradients: calls of {FP8_DTYPE} have none", q.dtype)
    check_flag(f"{entry.op}.backward", "wide_dq", wide_dq)
    given = entry.arguments(keywords) | {"q": q, "k": k, "v": v, "return_lse": True}
    swaps = given["layout"] == "bshd" and given["cu_seqlens_q"] is None
    run = _Run(entry, do, o, lse, dlse, wanted, wide_dq=wide_dq, swaps=swaps)
    with torch.no_grad():
        entry.call(run, **given)
        return run.gradients(q, given["scale"])


class _Run:
    """Computes the gradients of a call in the place of `apply`, which would compute o and lse."""

    def __init__(
        self,
        entry: BackwardEntry,
        do: Tensor,
        o: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        wanted: Sequence[str] | None,
        *,
        wide_dq: bool,
        swaps: bool,
    ) -> None:
        self.entry, self.do, self.o, self.lse, self.dlse = entry, do, o, lse, dlse
        self.wanted, self.wide_dq, self.swaps = wanted, wide_dq, swaps
        self._found: dict[str, Tensor] = {}

    def __call__(self, function: Any, *args: Any) -> tuple[Tensor, ...]:
        kernels = function.kernels()
        q, v = (args[kernels.parameters.index(name)] for name in ("q", "v"))
        shape = (*q.shape[:-1], v.shape[-1])
        for name, x in (("do", self.do), ("o", self.o)):
            self._check_place(name, x, q.device)
            self.entry.check_result(x, name, [shape[i] for i in (0, 2, 1, 3)] if self.swaps else shape)
        for name, x in (("lse", self.lse), *([] if self.dlse is None else [("dlse", self.dlse)])):
            self._check_place(name, x, q.device)
            self.entry.check_result(x, name, (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3], "float32")
        do, o = (x.transpose(1, 2) if self.swaps else x for x in (self.do, self.o))
        wanted = self.entry.wanted(self.wanted, kernels.gradients)
        self._found = kernels.gradients_of(do, self.dlse, o, self.lse, args, wanted=wanted, wide_dq=self.wide_dq)
        return o, self.lse

    def _check_place(self, name: str, x: Any, device: torch.device) -> None:
        """Raise an error unless an argument is a tensor with strides on this device."""
        op = f"{self.entry.op}.backward"
        check_strided(op, name, x)
        if x.device != device:
            fail(op, name, f"device {device}, that of q", x.device)

    def gradients(self, q: Tensor, scale: float | None) -> Gradients:
        """The computed gradients, in the layouts of the op's arguments."""
        dq, dk, dv = (self._found.pop(name) for name in ("q", "k", "v"))
        if scale is not None and scale <= 0:
            # The kernels' q is q times the sign of the scale: so is its gradient.
            dq = -dq if scale < 0 else dq * 0
        if self.swaps:
            dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        own = {name: self._found[x] for name, x in self.entry.names.items() if x in self._found}
        return Gradients(dq if self.wide_dq else dq.to(q.dtype), dk, dv, own)
