"""Bounds of logits hold for whatever a score reads, and a fixed reference keeps weights and sums inside their types."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen.analysis.score_bounds import ANY, LARGEST_EXPONENT, RUNNING_EXPONENT, Range, bounds, fixed_reference
from codegen.ir import expr
from codegen.ir.derive import derivative
from codegen.ir.evaluate import evaluate
from codegen.ir.expr import Type, const, float_var
from codegen.ir.parse import parse
from codegen.load.spec_file import load_text
from codegen.plan.variant import plan
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, texts
from tests.unit.analysis.test_score_split import inputs

LEAST_NORMAL = -126
"""The exponent of the least normal bfloat16 and float32."""

BOUNDED = {
    "20 * tanh(score / 20)": (-20, 20),
    "min(max(score, -3), 5)": (-3, 5),
    "clamp(score, -3, 5) - 1": (-4, 4),
    "abs(clamp(score, -3, 2))": (0, 3),
    "-2 * sigmoid(score)": (-2, 0),
    "relu(clamp(score, -3, 2)) + 3": (3, 5),
    "3 * tanh(score) * tanh(score)": (-3, 3),
    "where(q_idx == kv_idx, 7.0, tanh(score))": (-1, 7),
    "tanh(score) + tanh(cap * (kv_idx - q_idx))": (-2, 2),
}
UNBOUNDED = ("score", "cap * tanh(score / cap)", "score * tanh(score)", "exp(tanh(score))", "tanh(score) + level[h]")


@pytest.mark.parametrize("text", BOUNDED)
def test_bounds_of_scores(text: str) -> None:
    found = bounds(parse(text, SCOPE, Type.FLOAT))
    assert (found.low, found.high) == pytest.approx(BOUNDED[text])


def test_a_derivative_is_bounded_in_time() -> None:
    """A derivative shares its nodes: written out, this one has more than 2**60."""
    text = "score"
    for i in range(60):
        text = f"max(min({text}, {i}.5), -{i}.0)" if i % 2 else f"clamp({text}, -{i}.0, {i}.5)"
    e = derivative(parse(text, SCOPE, Type.FLOAT), float_var("score"))
    assert e.size > 2**60
    assert bounds(e) == Range(0.0, 1.0)


@pytest.mark.parametrize("text", UNBOUNDED)
def test_scores_without_bounds(text: str) -> None:
    e = parse(text, SCOPE, Type.FLOAT)
    assert not bounds(e).is_bounded
    assert fixed_reference(e) is None


@settings(max_examples=300, deadline=None)
@given(text=texts("score", 4), seed=st.integers(0, 99))
def test_bounds_contain_all_values(text: str, seed: int) -> None:
    try:
        e = parse(text, SCOPE, Type.FLOAT)
    except ExprError:
        reject()
    variables, tensors = inputs(seed)
    for large in (1.0, 1e3):
        with np.errstate(all="ignore"):
            values = evaluate(e, variables | {"score": variables["score"] * large}, tensors)
        found = bounds(e)
        margin = 1e-9 * (1 + np.abs(values))
        assert (np.isnan(values) | ((values >= found.low - margin) & (values <= found.high + margin))).all()


@pytest.mark.parametrize("cap", [1.0, 20.0, 30.0, 46.0, 50.0, 51.0])
@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
def test_reference_keeps_weights_and_sums_inside_their_types(cap: float, shift: float) -> None:
    limit = cap * math.log2(math.e)
    capped = expr.mul(const(limit), expr.function("tanh", expr.float_var("qk")))
    reference = fixed_reference(expr.add(capped, const(shift)))
    assert reference is not None
    largest, least = limit + shift - reference, -limit + shift - reference
    assert least - 26 >= LEAST_NORMAL - 1e-9  # the exponent of a product with a value of 2**-26
    assert largest <= LARGEST_EXPONENT
    assert math.isfinite(np.float32(2.0 ** (largest + 31)))  # the sum over 2**31 keys
    # If both ends leave a choice, sums overflow at the same exponent as sums with running maxima.
    assert largest == pytest.approx(RUNNING_EXPONENT) or least == pytest.approx(-100)


@pytest.mark.parametrize("cap", [52.0, 1e4])
def test_wide_ranges_have_no_reference(cap: float) -> None:
    assert (
        fixed_reference(expr.mul(const(cap * math.log2(math.e)), expr.function("tanh", expr.float_var("qk")))) is None
    )


SPEC = """
variants:
  capped: {mask: causal, score: 20 * tanh(score / 20)}
  with_sink: {mask: causal, score: 20 * tanh(score / 20), sink: true}
  with_decay: {mask: causal, score: 20 * tanh(score / 20), decay: true}
  plain: {mask: causal}
"""


def test_only_bounded_softmaxes_have_a_reference() -> None:
    plans = {name: plan(variant) for name, variant in load_text(SPEC, "bounded").variants.items()}
    found = {name: planned.hopper_fwd.fixed_reference for name, planned in plans.items()}
    assert found.pop("capped") == pytest.approx(20 * math.log2(math.e) - 8)
    assert found == {"with_sink": None, "with_decay": None, "plain": None}
    assert all(p.hopper_fwd_fp8 is not None and p.hopper_fwd_fp8.fixed_reference is None for p in plans.values())


def test_nothing_is_known_of_other_expressions() -> None:
    assert bounds(expr.float_var("qk")) == ANY
