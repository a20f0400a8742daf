"""Whether a result is right: its error against float64, beside those that the same mathematics makes in its own dtype.

The bounds, from STYLE 21 and `tests/support/judge.py`. Those of tests are tight and for chosen calls; these are for any
expression, and what they look for are wrong results, which are off by far more.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Attention, Problem, Results
from .expressions import Nudge

RATIO = 3.0
"""Of the largest error of the same computation in plain PyTorch, which rounds in the same places, in another order."""

TERMS = {"float32": 16.0, "float16": 4.0, "bfloat16": 4.0}
"""Besides, in eps of the inputs' dtype times the size of the terms of an element. In 16 bits: the probability, or its
gradient, o in the backward's row sums, the operand of a product and the result, half an eps each, twice. In float32
each of these is a sum and an expression of several roundings."""

SCORE = 8.0
"""Besides, in float32 eps times the largest score times the size of the terms: exp makes the absolute error of a score,
which is a float32 sum whatever the dtype, and of its expression a relative one of every term."""

SHIFT = 3e-5
"""How far off a float may be where an expression compares, takes a maximum or an integer part: hundreds of float32
eps. A result may then be on either side."""

TANH = 2.0**-10
"""Relative error of the tanh instruction that 16-bit inputs get on NVIDIA chips: 2**-11 (PTX), and as much again."""


_DECIDES = re.compile(r"[<>=]|\b(min|max|abs|relu|clamp|int|floor|ceil|round)\(")
_TANH = re.compile(r"tanh|softcap")


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A result that is wrong. Sizes are of the element that is furthest beyond its bound."""

    name: str
    error: float
    bound: float
    size: float
    wrong: int
    count: int

    def __str__(self) -> str:
        off = "NaN" if math.isnan(self.error) else f"off by {self.error:.3g}, bound {self.bound:.2g}"
        return f"{self.name}: {off}, largest wanted {self.size:.3g}, {self.wrong} of {self.count} elements"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The results in float64 and the bound of every element's error."""

    results: Results
    bounds: Results


def wanted(problem: Problem, dtype: str, with_lse: bool, *, tanh: bool = False) -> Wanted:
    """What a call has to give; `tanh`: on a device whose tanh is an instruction."""
    exact = Attention(problem)
    results = exact.results(with_lse)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    eps, eps32 = torch.finfo(torch_dtype).eps, torch.finfo(torch.float32).eps
    tiny = max(torch.finfo(torch_dtype).tiny, torch.finfo(torch.float32).tiny / eps)
    plain = Attention(problem, torch_dtype).results(with_lse)
    largest = exact.largest_score()
    has_grads = len(results) > 2
    sizes = exact.sizes(with_lse, tiny) if has_grads else {}
    relative = TERMS[dtype] * eps + SCORE * eps32 * largest
    bounds = {}
    for name, want in results.items():
        base = _apart(plain[name], want)
        bound = torch.full_like(want, RATIO * (base.max().item() if base.numel() else 0.0))
        bound += tiny + relative * sizes.get(name, want.abs().nan_to_num(posinf=0.0, neginf=0.0))
        if name == "lse":
            bound = torch.full_like(want, SCORE * eps32 * largest)
        own = problem.tensors.get(name.removeprefix("d"))
        if own is not None and name != "o":
            # A gradient is rounded to the declared dtype, which kernels read, and then to that of the tensor.
            declared = problem.entry.get("tensors", {}).get(name.removeprefix("d"), {}).get("dtype", "float32")
            bound += max(torch.finfo(own.dtype).eps, torch.finfo(getattr(torch, declared)).eps) * want.abs()
        bounds[name] = bound
    for nudge in _nudges(str(problem.entry.get("score")), instruction=tanh and dtype != "float32"):
        moved = Attention(problem, nudge=nudge).results(with_lse)
        for name, bound in bounds.items():
            bound += 2 * _apart(moved[name], results[name])
    return Wanted(results=results, bounds=bounds)


def _nudges(score: str, *, instruction: bool) -> list[Nudge]:
    """Changes of what a rounding may decide otherwise; with the instruction a tanh before a comparison may, too."""
    shift = SHIFT * (40 if instruction and _TANH.search(score) else 1)
    found = [Nudge(shift=shift), Nudge(shift=-shift)] if _DECIDES.search(score) else []
    return found + ([Nudge(tanh=TANH), Nudge(tanh=-TANH)] if instruction and _TANH.search(score) else [])


def _apart(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() - y.double()).abs().nan_to_num(nan=0.0, posinf=0.0)


def mismatches(got: Results, want: Wanted) -> list[Mismatch]:
    """Every result that is beyond its bound anywhere, NaN, or -inf in other rows."""
    found = []
    for name, wanted_x in want.results.items():
        x = got[name].double()
        if x.shape != wanted_x.shape:
            found.append(_mismatch(name, torch.full((1,), math.nan), torch.zeros(1), wanted_x))
            continue
        same = (x == wanted_x) & x.isinf()
        error = torch.where(same, 0.0, (x - wanted_x).abs())
        # Of infinity on one side alone.
        error = torch.where(error.isinf(), math.inf, error)
        if not (error <= want.bounds[name]).all():
            found.append(_mismatch(name, error, want.bounds[name], wanted_x))
    return found


def _mismatch(name: str, error: Tensor, bound: Tensor, wanted_x: Tensor) -> Mismatch:
    beyond = ~(error <= bound)
    over = torch.where(error.isnan(), math.inf, error / bound.clamp(min=1e-300)).reshape(-1)
    worst = int(over.argmax())
    finite = wanted_x[wanted_x.isfinite()]
    return Mismatch(
        name=name,
        error=error.reshape(-1)[worst].item(),
        bound=bound.reshape(-1)[worst].item(),
        size=finite.abs().max().item() if finite.numel() else 0.0,
        wrong=int(beyond.sum()),
        count=error.numel(),
    )
