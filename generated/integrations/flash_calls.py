# SPDX-License-Identifier: Apache-2.0
"""Translates arguments of FlashAttention 2 into a variant of this package and the arguments of its op.

`flash_attn` and `sdpa` share this: a mask is two numbers `window_size`, -1 for no bound, and `causal`; the last query
is aligned with the last key; a logit may be capped and have ALiBi subtracted (arXiv:2307.08691).

>>> found = chosen("flash_attn_func", causal=True, window_size=(127, -1))
>>> found.variant, found.arguments
('window', {'size': 128})
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import index
from typing import Any

import torch
from torch import Tensor

from .. import torch as ops
from .._runtime.core.checks import check_flag, check_float, fail
from .entries import Attention, constant
from .variants import Found, find

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_PACKAGE = __name__.rpartition(".integrations.")[0]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The variant that computes a call, and its own arguments.

    `by_position`: whether the variant reads positions, so that the alignment of queries with keys matters.
    """

    variant: str
    arguments: Mapping[str, Any]
    by_position: bool

    @property
    def op(self) -> Any:
        return getattr(ops, self.variant)

    @property
    def q_offset(self) -> str | int:
        """The last query is aligned with the last key."""
        return "end" if self.by_position else 0

    @property
    def kernels(self) -> Any:
        """The module with the launches of the variant, `DENSE` and `PACKED`."""
        return import_module(f"{_PACKAGE}.{self.variant}.torch_op")


def chosen(
    title: str,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    heads: int = 0,
    batch: int | None = None,
    dropout_p: float = 0.0,
) -> Chosen:
    """The variant for a call.

    Args:
        title: the prefix of errors.
        causal: no query sees a key after its own position, whatever `window_size[1]` is.
        window_size: how many keys before and after its position a query sees; a negative number is no bound.
        softcap: the value at which logits are capped; 0 or less means no cap.
        alibi_slopes: `[H]` or `[B, H]`: `slope * |distance|` is subtracted from capped logits. They get no gradient.
        heads: H. batch: B.
        dropout_p: the dropout probability.

    Raises:
        ArgumentError: a window that is no pair of ints, slopes of another shape.
        NotRenderedError: the package has no variant for the call; the message has the entry to add.
    """
    before, after = _bounds(title, check_flag(title, "causal", causal), window_size)
    if torch.compiler.is_compiling():
        softcap, dropout_p = (_traced(x) for x in (softcap, dropout_p))
    axes = None
    if alibi_slopes is not None:
        axes = _axes_of_slopes(title, alibi_slopes, heads, batch)
    cap = _cap(title, softcap)
    found = _found(before, after, cap, axes, bool(dropout_p))
    arguments: dict[str, Any] = dict(found.scalars)
    if found.slope is not None and alibi_slopes is not None:
        arguments[found.slope] = alibi_slopes.detach()
    if dropout_p:
        arguments["dropout_p"] = dropout_p
    by_position = before is not None or after is not None or axes is not None
    return Chosen(variant=found.name, arguments=arguments, by_position=by_position)


def _traced(number: Any) -> Any:
    """An argument of a trace: a number as a constant, anything else as it is, which later checks refuse."""
    return constant(number) if isinstance(number, _NUMBERS) and not isinstance(number, bool) else number


def _cap(title: str, softcap: Any) -> float | None:
    """The value at which logits are capped; None if they are not."""
    cap = check_float(title, "softcap", softcap)
    if not -math.inf < cap < math.inf:
        fail(title, "softcap", "a finite number, 0 for no cap", softcap)
    return float(cap) if cap > 0 else None


def _bounds(title: str, causal: bool, window_size: Any) -> tuple[int | None, int | None]:
    """How many keys before and after its position a query sees; None for all."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        fail(title, "window_size", "two ints (left, right), -1 for no bound", repr(window_size))
    for size in window_size:
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            fail(title, "window_size", "two ints (left, right), -1 for no bound", repr(window_size))
    # A trace with dynamic shapes takes ints for symbols; `index` makes them constants again.
    before, after = (None if size < 0 else index(size) for size in window_size)
    return before, 0 if causal else after


def _axes_of_slopes(title: str, slopes: Any, heads: int, batch: int | None) -> str:
    expected = f"a float tensor [{heads}] or [{'batch' if batch is None else batch}, {heads}]"
    if not isinstance(slopes, Tensor):
        fail(title, "alibi_slopes", expected, type(slopes).__name__)
    shape = tuple(slopes.shape)
    # Sizes are compared one by one, because `in` finds no symbolic size.
    fits = shape[-1:] == (heads,) and (len(shape) == 1 or (len(shape) == 2 and shape[0] == batch))
    if not slopes.dtype.is_floating_point or not fits:
        fail(title, "alibi_slopes", expected, f"{slopes.dtype} {list(shape)}")
    return "h" if slopes.dim() == 1 else "b, h"


def _found(before: int | None, after: int | None, cap: float | None, alibi: str | None, dropout: bool) -> Found:
    if not torch.compiler.is_compiling():
        return _searched(before, after, cap, alibi, dropout)
    name, scalars, slope = _found_while_tracing(before, after, cap, alibi, dropout)
    return Found(name=name, scalars=dict(scalars), slope=slope)


@cache
def _searched(before: int | None, after: int | None, cap: float | None, alibi: str | None, dropout: bool) -> Found:
    return find(Attention(before=before, after=after, cap=cap, alibi=alibi, dropout=dropout))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _found_while_tracing(
    before: int | None, after: int | None, cap: float | None, alibi: str | None, dropout: bool
) -> tuple[str, tuple[tuple[str, int | float], ...], str | None]:
    """The result of `find` as constants of a trace, which cannot read the file that `find` reads."""
    found = _searched(before, after, cap, alibi, dropout)
    return found.name, tuple(found.scalars.items()), found.slope
