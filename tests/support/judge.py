"""The bounds on errors, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support import packings, plain
from tests.support.cases import INTERPRET, MANIFEST, evaluate

EPS32 = torch.finfo(torch.float32).eps

MEAN_RATIO = {"o": 1.1, "dv": 1.1, "dq": 1.3, "dk": 1.3}
"""Mean error over that of plain PyTorch in the same dtype. dq and dk: the row sums of the backward start from the
rounded o. A variant's own gradients are sums of many terms of both signs, which either side rounds its own way: 3."""
OWN_RATIO = 3.0

FEWEST = 32
"""With fewer elements, such as one gradient per head, the mean error depends on chance, so only the largest error is
bounded. The same holds for o and dv of fewer weights, such as four rows with one key each: all elements of a value
share the rounding of its weight. And it holds for dq and dk of fewer query rows: all elements of a row of ds share the
error of its delta. The bound on dg allows for that error if there are fewer keys (`_delta_error`)."""

MEAN_FLOOR = 0.125
"""Added to the bound of the mean error, in float32 eps of the terms' size times the largest score: a rounding of one
term in eight. Plain PyTorch is exact if there is one key, and in float32 only the order of sums differs."""

LARGEST = 2.0
"""Largest error of an element, in eps of the terms that make it up. Four roundings of half an eps each: the
probabilities (or their gradients), the o the backward starts from, the dot's operand, the result."""

LARGEST_SCORE = 4.0
"""Added to LARGEST, in float32 eps times the largest score: a score is a float32 sum; exp makes its error relative."""


def golden_of(variant: str, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """The results in float64."""
    return golden.evaluate(reference_of(variant, packed="cu_seqlens_q" in options), inputs.double(), **options)


def reference_of(variant: str, *, packed: bool = False) -> Callable[..., Any]:
    """The op in plain PyTorch: as written in `plain` if `plain` covers the variant, else the package's reference."""
    entry = MANIFEST[variant]
    op = plain.attention(entry) if plain.covers(entry) else golden.load_reference(variant)
    return packings.per_sequence(entry, op) if packed else op


def check_call(
    variant: str, inputs: Inputs, *, config: Any = None, framework: Any = "torch", **options: Any
) -> dict[str, Tensor]:
    """Run a call and hold o, lse and every gradient to all bounds; `options` also go to the golden."""
    got = evaluate(variant, inputs, config=config, framework=framework, **options)
    check_results(variant, inputs, got, **options)
    return got


def check_results(
    variant: str, inputs: Inputs, got: Mapping[str, Tensor], *, ratios: bool = True, **options: Any
) -> None:
    """Check the results of a call, packed or in layout "bhsd", by the bounds; `ratios`: also against plain PyTorch."""
    want = golden_of(variant, inputs, **options)
    for name, wanted in want.items():
        assert got[name].shape == wanted.shape, f"{name}: shape {list(got[name].shape)}, not {list(wanted.shape)}"
        assert not got[name].isnan().any(), f"{name}: {int(got[name].isnan().sum())} of {got[name].numel()} are NaN"
    assert got["o"].dtype == inputs.q.dtype
    assert got["lse"].dtype == torch.float32
    entry = MANIFEST[variant]
    if not plain.covers(entry):  # no sizes of terms: the bounds of `make demo` alone
        finite = {name: wanted for name, wanted in want.items() if wanted.numel() and name != "lse"}
        errors = golden.relative_errors(got, finite)
        assert max(errors.values(), default=0.0) <= golden.BOUND[inputs.q.dtype], errors
        return
    term_sizes = packings.term_sizes if "cu_seqlens_q" in options else plain.term_sizes
    sizes, score = term_sizes(entry, inputs.double(), inputs.q.dtype, **options)
    problems = [_lse_problem(got["lse"], want["lse"], score, _instruction_error(entry, inputs))]
    problems += [_largest_problem(name, got[name], want[name], size, inputs, score) for name, size in sizes.items()]
    if ratios:
        baseline = golden.evaluate(reference_of(variant, packed="cu_seqlens_q" in options), inputs, **options)
        problems += [_mean_problem(name, got, want, baseline, inputs, size, score) for name, size in sizes.items()]
    found = [problem for problem in problems if problem]
    assert not found, "\n".join(found)


def _instruction_error(entry: Mapping[str, Any], inputs: Inputs) -> float:
    """Relative error of a score that a special instruction computes: tanh of 16-bit inputs on a GPU, 2**-11 (PTX)."""
    soft = "tanh" in entry["score"] or "softcap" in entry["score"]
    return 2.0**-11 if soft and not INTERPRET and inputs.q.dtype != torch.float32 else 0.0


def _lse_problem(got: Tensor, want: Tensor, score: float, instruction: float) -> str:
    """lse is computed in float32, so its error is the rounding of one score and of the sum, whatever q's dtype."""
    masked = want == float("-inf")
    if not torch.equal(got == float("-inf"), masked):
        return "lse: -inf in the wrong rows"
    error = (got.double() - want).masked_fill(masked, 0.0).abs()
    bound = (LARGEST_SCORE * EPS32 + instruction) * score
    worst = error.max().item() if error.numel() else 0.0
    return "" if worst <= bound else f"lse: largest error {worst:.2e}, above {bound:.2e}"


def _largest_problem(name: str, got: Tensor, want: Tensor, size: Tensor, inputs: Inputs, score: float) -> str:
    eps = torch.finfo(inputs.q.dtype).eps
    if not want.numel():
        return ""
    error = (got.double() - want).abs() / size / (LARGEST * eps + LARGEST_SCORE * EPS32 * score)
    worst = error.max().item()
    return "" if worst <= 1 else f"{name}: largest error {worst:.2f} times its bound, at {_where(error)}"


def _mean_problem(
    name: str,
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor],
    inputs: Inputs,
    size: Tensor,
    score: float,
) -> str:
    rows, keys = want["lse"].numel(), inputs.k.shape[-2 if inputs.k.ndim == 4 else 0]
    shared = {"o": rows * keys, "dv": rows * keys, "dq": rows, "dk": rows}
    if min(want[name].numel(), shared.get(name, FEWEST)) < FEWEST:
        return ""
    ours, plains = ((x[name].double() - want[name]).abs().mean().item() for x in (got, baseline))
    ratio = MEAN_RATIO.get(name, OWN_RATIO)
    floor = MEAN_FLOOR * EPS32 * score * size.mean().item()
    if name == "dg" and want["dk"].shape[:-1].numel() < FEWEST:
        floor += _delta_error(got["o"], want["o"], inputs)
    if ours <= ratio * plains + floor:
        return ""
    return f"{name}: mean error {ours:.2e}, above {ratio} times plain PyTorch's {plains:.2e} and {floor:.1e}"


def _delta_error(got: Tensor, want: Tensor, inputs: Inputs) -> float:
    """The mean error of dg behind the last key, because delta is computed from an o in q's dtype.

    dg sums there all rows of ds from its position on. Each of these rows sums to the gradient of its lse, plus the
    error of its delta. Plain PyTorch does not round o there. The error of o itself has bounds of its own.
    """
    of_rows = ((got.double() - want) * inputs.do.double()).sum(-1)  # [B, H, S], packed [T, H]
    tokens = of_rows if inputs.q.ndim == 4 else of_rows.T
    return tokens.flip(-1).cumsum(-1).abs().mean().item()


def _where(x: Tensor) -> list[int]:
    return [int(index) for index in torch.unravel_index(x.argmax(), x.shape)]
