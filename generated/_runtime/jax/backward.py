# SPDX-License-Identifier: Apache-2.0
"""The backward of an op by itself: gradients of a call whose o and lse are known, such as those merged from calls.

dk and dv are float32, because they are partial sums over calls or devices. Only the complete sum is rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ..core.backward_calls import BackwardEntry, shown_as
from ..core.checks import fail
from ..core.fp8 import FP8
from ..core.schedules import Schedule
from .call import Arguments, is_empty, prepared
from .passes import Backward, Kernels
from .primitive import gradients_of
from .support import check_flag

Run: TypeAlias = Callable[..., tuple[jax.Array, jax.Array]]
"""A function that computes a call with checked arguments: `attention`, or `_Run`, which computes gradients."""


class Gradients(NamedTuple):
    """Gradients of a call.

    Attributes:
        dq: in the layout and dtype of q, or float32. dk, dv: in the layouts of k and v, float32.
        own: gradients of the variant's own arrays by keyword, including a sink and a log-decay.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    own: dict[str, jax.Array]


def give_backward(op: Any, call: Callable[..., Any]) -> None:
    """Set `op.backward`. `call(run, ...)` is the body of the op, with all of its parameters but those for pages."""
    entry = BackwardEntry(op, call)

    def backward(*args: Any, **keywords: Any) -> Gradients:
        return _backward(entry, *args, **keywords)

    op.__dict__["backward"] = shown_as(backward, _backward, op)


def _backward(
    entry: BackwardEntry,
    do: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    *,
    dlse: jax.Array | None = None,
    wanted: Sequence[str] | None = None,
    wide_dq: bool = False,
    **keywords: Any,
) -> Gradients:
    """The gradients of `op(q, k, v, return_lse=True, **keywords)`, whose results were o and lse.

    Only the probabilities are recomputed. o and lse may cover more keys than k has. Then dk and dv are the complete
    gradients of the keys in k, and dq is the part of the gradient of q that comes from these keys. The gradient of a
    log-decay is correct only if k has all keys of a row. The gradients cannot be differentiated again.

    Args:
        do: gradient of o.
        q: as the op takes it.
        k: as the op takes it.
        v: as the op takes it.
        o: as the op returned it, or merged from several calls.
        lse: as the op returned it, or merged from several calls.
        dlse: gradient of lse, float32, or None.
        wanted: keywords of the variant's own arrays whose gradients are wanted. None: all arrays that have a gradient.
        wide_dq: dq is float32, as dk and dv are.
        **keywords: those of the op, except those of pages.

    Raises:
        ArgumentError: a bad argument.
    """
    if str(getattr(q, "dtype", "")) == FP8:
        fail(entry.op, "q", f"a dtype with gradients: calls of {FP8} have none", q.dtype)
    wide_dq = check_flag(f"{entry.op}.backward", "wide_dq", wide_dq)
    run = _Run(entry, do, o, lse, dlse, wanted, wide_dq=wide_dq)
    entry.call(run, **entry.arguments(keywords), q=q, k=k, v=v)
    return run.gradients()


class _Run:
    """A stand-in for `attention` that computes the gradients of a call instead of o and lse."""

    def __init__(
        self,
        entry: BackwardEntry,
        do: jax.Array,
        o: jax.Array,
        lse: jax.Array,
        dlse: jax.Array | None,
        wanted: Sequence[str] | None,
        *,
        wide_dq: bool,
    ) -> None:
        self.entry, self.do, self.o, self.lse, self.dlse = entry, do, o, lse, dlse
        self.wanted, self.wide_dq = wanted, wide_dq
        self._found: Gradients

    def __call__(
        self, dense: Kernels, packed: Kernels, segmented: Kernels, arguments: Arguments, schedule: Schedule | None
    ) -> tuple[jax.Array, jax.Array]:
        arguments.options = arguments.options.widely(queries=self.wide_dq)
        (q, _, v), dtype, rows = arguments.arrays, arguments.q.dtype, arguments.q.shape[:-1]
        for name, given in (("do", self.do), ("o", self.o)):
            self.entry.check_result(given, name, (*q.shape[:-1], v.shape[-1]))
        for name, x in (("lse", self.lse), ("dlse", self.dlse)):
            if x is not None or name == "lse":
                self.entry.check_result(x, name, rows[::-1] if arguments.packed else rows, "float32")
        kernels, call, arrays = prepared(dense, packed, segmented, arguments, schedule)
        wanted = tuple(self.entry.wanted(self.wanted, kernels.gradients))
        do, o = (x.astype(arrays[0].dtype) for x in (self.do, self.o))
        if is_empty(arguments):
            shapes = Backward(kernels).shapes(replace(call, wanted=wanted), call.named(arrays))
            found = dict(zip(("q", "k", "v", *wanted), (jnp.zeros(*shape) for shape in shapes), strict=True))
        else:
            found = gradients_of(kernels, call, arrays, o, self.lse, do, self.dlse, wanted)
        dq, dk, dv = (found.pop(name) for name in ("q", "k", "v"))
        if arguments.scale is not None and arguments.scale <= 0:
            # The kernels read q times the sign of the scale (`positive_scale`), and dq is the gradient of that q.
            dq = -dq if arguments.scale < 0 else dq * 0
        own = {name: found[x] for name, x in self.entry.names.items() if x in found}
        self._found = Gradients(dq if self.wide_dq else dq.astype(dtype), dk, dv, own)
        return self.o, self.lse

    def gradients(self) -> Gradients:
        """The gradients that the call has computed."""
        return self._found
