"""Scalars of own variants: the ranges that sums of several leave, and formulas without a finite value at a scalar."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.support.rendering import importable

SPEC = """
variants:
  logs: {score: score * log(x), scalars: {x: float}}
  quotients: {mask: causal and q_idx - kv_idx < 1.0 / x, score: score + 1.0 / x, scalars: {x: float}}
  powers: {score: score + exp(x) * sqrt(x), scalars: {x: float}}
  signs: {score: "where(1.0 / x > 0, score, -score)", scalars: {x: float}}
  places: {score: "score + bias[h, int(log(x))]", tensors: {bias: {dims: [h, 4]}}, scalars: {x: float}}
  steps: {mask: causal and q_idx // n == kv_idx // n, scalars: {n: int}}
  strides: {mask: causal and (q_idx - kv_idx) % n == 0, scalars: {n: {type: int, min: 0, max: 64}}}
  apart: {mask: q_idx - kv_idx < near - far, scalars: {near: int, far: int}}
"""

MOST = 2**29
PAGES = {"page_table": torch.zeros(1, 1, dtype=torch.int32), "kv_lengths": torch.tensor([12], dtype=torch.int32)}
PACKED = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 5, 12], dtype=torch.int32))
SEGMENTED = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), torch.zeros(1, 12, dtype=torch.int32))
CALLS: dict[str, dict[str, torch.Tensor]] = {"dense": {}, "packed": PACKED, "segmented": SEGMENTED, "paged": PAGES}


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("scalars"), "scalars", SPEC):
        yield


def called(framework: str, variant: str, given: dict[str, torch.Tensor], **scalars: Any) -> Any:
    """The output of a variant's op for twelve tokens, in a kind of call that `given` decides."""
    torch.manual_seed(0)
    q = torch.randn(*((12, 2, 8) if "cu_seqlens_q" in given else (1, 2, 12, 8)))
    keys = torch.randn(1, 16, 2, 8) if "page_table" in given else q
    op = getattr(importlib.import_module(f"scalars.{framework}"), variant)
    if framework == "torch":
        return op(q, keys, keys, **given, **scalars, layout="bhsd").numpy()
    arrays = {name: jnp.asarray(x.numpy()) for name, x in given.items()}
    return np.asarray(op(*(jnp.asarray(x.numpy()) for x in (q, keys, keys)), **arrays, **scalars, layout="bhsd"))


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_several_scalars_of_a_sum_share_its_range(framework: str, kind: str) -> None:
    message = rf"apart: far: expected an int from -{MOST} to {MOST}, got {-MOST - 1}"
    with pytest.raises(ValueError, match=message):
        called(framework, "apart", CALLS[kind], near=0, far=-MOST - 1)
    everything = called(framework, "apart", CALLS[kind], near=100, far=0)
    assert np.array_equal(called(framework, "apart", CALLS[kind], near=MOST, far=-MOST), everything)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("variant", ["steps", "strides"])
def test_a_number_that_integers_are_divided_by_is_not_0(variant: str, framework: str, kind: str) -> None:
    """Kernels would compute what no one asked for."""
    with pytest.raises(ValueError, match=f"^{variant}: n: expected an int other than 0, as it divides, got 0"):
        called(framework, variant, CALLS[kind], n=0)
    called(framework, variant, CALLS[kind], n=3)


def test_plans_over_several_gpus_divide_by_no_0() -> None:
    plan = importlib.import_module("scalars.torch_parallel").plan
    op = importlib.import_module("scalars.torch").steps
    with pytest.raises(ValueError, match="plan: steps: n: expected an int other than 0, as it divides, got 0"):
        plan(op, 2, seq=4096, heads=(2, 2), head_dim=64, n=0)


def test_arrays_on_the_host_are_checked_too() -> None:
    with pytest.raises(ValueError, match=f"near: expected an int from -{MOST} to {MOST}"):
        called("jax", "apart", {}, near=jnp.asarray(2**30), far=0)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_zeros_of_both_signs_differ(framework: str, kind: str) -> None:
    found = [called(framework, "signs", CALLS[kind], x=x) for x in (0.0, -0.0, 1.0, -1.0)]
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])
    assert not np.array_equal(found[0], found[1])


OF_FLOATS = [
    ("logs", 0.0, False),
    ("logs", -1.0, False),
    ("logs", 1.0, True),
    ("quotients", 0.0, False),
    ("powers", 1000.0, False),
    ("powers", -1.0, False),
    ("places", 0.0, True),
    ("places", -1.0, True),
]


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize(("variant", "x", "finite"), OF_FLOATS)
def test_a_formula_without_a_finite_value_raises_no_error(variant: str, x: float, finite: bool, kind: str) -> None:
    """Kernels compute infinity or NaN."""
    given = CALLS[kind]
    if variant == "places":
        given = given | {"bias": torch.arange(8.0).reshape(2, 4)}
    got = [called(framework, variant, given, x=x) for framework in ("torch", "jax")]
    np.testing.assert_allclose(got[0], got[1], rtol=1e-5, atol=1e-5)
    assert np.isfinite(got[0]).all() == finite


def test_plans_over_several_gpus_divide_by_zero() -> None:
    op = importlib.import_module("scalars.torch").quotients
    plan = importlib.import_module("scalars.torch_parallel").plan

    everything, *others = (plan(op, 2, seq=4096, heads=(2, 2), head_dim=64, x=x) for x in (0.0, 1e-9))
    assert everything.loads == others[0].loads


FUNCTIONS: dict[str, Any] = {
    **{
        name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "sin", "cos", "tan", "tanh")
    },
    **{name: getattr(np, name) for name in ("floor", "ceil", "round")},
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_numbers_are_those_of_numpy() -> None:
    from generated._runtime.core import scalar_math

    values = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.0, -7.3, 800.0, -800.0, np.inf, -np.inf, np.nan]
    for name, function in FUNCTIONS.items():
        got = [getattr(scalar_math, name)(x) for x in values]
        np.testing.assert_allclose(got, function(np.array(values)), rtol=1e-12, err_msg=name)
    for a in values:
        got = [scalar_math.divide(a, b) for b in values]
        np.testing.assert_array_equal(got, np.float64(a) / np.array(values))
    whole = [scalar_math.integer(x) for x in (2.7, -2.7, np.inf, -np.inf, np.nan)]
    assert whole == [2, -2, 2**31 - 1, -(2**31), 0]
