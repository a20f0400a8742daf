"""The numpy evaluator gives the values of the reference in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr, Load, Op, Type, add, const, float_var, floordiv, int_var, mod, mul, walk
from codegen.ir.parse import Scope, parse
from codegen.ir.printers import torch_printer
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, contents, texts

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7
SHAPE = (BATCH, HEADS, QUERIES, KEYS)


def inputs(seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Variables and tensors, a NaN and infinities among them. Queries reach beyond the tensors."""
    rng = np.random.default_rng(seed)
    variables = {
        "b": np.arange(BATCH).reshape(-1, 1, 1, 1),
        "h": np.arange(HEADS).reshape(-1, 1, 1),
        "hkv": np.arange(HEADS).reshape(-1, 1, 1) // 2,
        "q_idx": np.arange(QUERIES)[:, None] + 4,
        "kv_idx": np.arange(KEYS),
        "q_len": np.asarray(QUERIES),
        "kv_len": np.asarray(KEYS),
        "size": np.asarray(rng.integers(-5, 9)),
        "cap": np.asarray(rng.normal()),
        "score": rng.normal(size=SHAPE),
    }
    tensors = contents(rng, BATCH, HEADS, KEYS)
    tensors["weight"][:, rng.integers(KEYS)] = np.nan, np.inf, -np.inf
    return variables, tensors


def in_torch(text: str, names: dict[str, Any]) -> torch.Tensor:
    value = eval(text, {"torch": torch, **names})
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


@settings(deadline=None)
@given(kind=st.sampled_from(("mask", "score")), data=st.data(), seed=st.integers(0, 99))
def test_random_expressions_agree_with_torch(kind: str, data: st.DataObject, seed: int) -> None:
    text = data.draw(texts(kind, 4))
    try:
        e = parse(text, SCOPE, Type.BOOL if kind == "mask" else Type.FLOAT)
    except ExprError:  # a constant folds to more than 32 bits
        reject()
    variables, tensors = inputs(seed)
    got = evaluate(e, variables, tensors)
    source = torch_printer(lambda tensor, axis, index: False).text(e)
    want = in_torch(source, {name: torch.as_tensor(value) for name, value in {**variables, **tensors}.items()})
    np.testing.assert_allclose(np.broadcast_to(got, SHAPE), np.broadcast_to(want.numpy(), SHAPE), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", ["exp(0.5) if q_idx < kv_idx else 7", "1 / (0.3 if score > 0 else 0.7)"])
def test_a_choice_of_two_numbers_has_the_dtype_of_the_score(text: str, dtype: torch.dtype) -> None:
    variables, tensors = inputs(0)
    e = parse(text, SCOPE, Type.FLOAT)
    names = {name: torch.as_tensor(value) for name, value in variables.items()}
    names["score"] = names["score"].to(dtype)
    got = in_torch(torch_printer(lambda tensor, axis, index: False).text(e), names)
    assert got.dtype == dtype
    want = np.broadcast_to(evaluate(e, variables, tensors), SHAPE)
    tolerance = 4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(np.broadcast_to(got.numpy(), SHAPE), want, rtol=tolerance)


@pytest.mark.parametrize("a", [-7, -1, 0, 1, 7])
@pytest.mark.parametrize("b", [-3, -1, 1, 3])
def test_integers_divide_as_in_python(a: int, b: int) -> None:
    x, y = int_var("x"), int_var("y")
    values = {"x": a, "y": b}
    assert [int(evaluate(e, values, {})) for e in (floordiv(x, y), mod(x, y))] == [a // b, a % b]


def test_an_index_is_clamped_to_its_axis() -> None:
    read = Load(Type.INT, "t", (int_var("x"),))
    np.testing.assert_array_equal(
        evaluate(read, {"x": np.arange(-2, 5)}, {"t": np.array([5, 6, 7])}), [5, 5, 5, 6, 7, 7, 7]
    )


def test_results_have_the_type_of_the_expression() -> None:
    read = Load(Type.FLOAT, "t", (int_var("x"),))
    values, tensors = {"x": np.array(1, dtype=np.int32)}, {"t": np.ones(2, dtype=np.float16)}
    dtypes = [evaluate(e, values, tensors).dtype for e in (int_var("x"), read, const(True))]
    assert dtypes == [np.int64, np.float64, np.bool_]


def test_a_float_becomes_an_integer_toward_zero() -> None:
    cut = Op(Type.INT, "int", (float_var("x"),))
    np.testing.assert_array_equal(evaluate(cut, {"x": np.array([-1.5, -0.5, 0.5, 1.5])}, {}), [-1, 0, 0, 1])


def test_a_shared_subexpression_is_computed_once() -> None:
    """A variable is read once, however often and in however many copies it occurs in the tree."""

    class Counting(dict[str, int]):
        reads = 0

        def __getitem__(self, name: str) -> int:
            self.reads += 1
            return super().__getitem__(name)

    e: Expr = int_var("x")
    for _ in range(5):  # n -> (n + 1) * n
        e = mul(add(e, int_var("x")), e)
    values = Counting(x=1)
    assert evaluate(e, values, {}) == 3263442
    assert values.reads == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("int((q_idx - kv_idx) / 41) + 0.0", lambda x: math.trunc(x / 41)),
        ("int((kv_idx - q_idx) / -41) + 0.0", lambda x: math.trunc(x / 41)),
        ("floor((q_idx - kv_idx) / 41)", lambda x: math.floor(x / 41)),
        ("ceil((2 + q_idx - kv_idx - 2) / 41.0)", lambda x: math.ceil(x / 41)),
    ],
)
def test_roundings_of_a_whole_quotient_divide_integers(text: str, wanted: Callable[[int], int]) -> None:
    """In float32 41 times the reciprocal of 41 is below 1."""
    e = parse(text, Scope(), Type.FLOAT)
    assert not any(isinstance(node, Op) and node.op in ("int", "floor", "ceil", "mul") for node in walk(e))
    positions = np.arange(500)
    found = evaluate(e, {"q_idx": positions, "kv_idx": 250}, {})
    np.testing.assert_array_equal(found, [wanted(x) for x in range(-250, 250)])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("q_idx / 3 < inf", True),
        ("-(q_idx / 3) + kv_idx / 7 > -inf", True),
        ("q_idx / 3 < 3e38", True),  # three times the literal is no float32
        ("q_idx / 3 > 1.2e38 - kv_idx / 5", False),
        ("q_idx > -2147483648", True),
    ],
)
def test_comparisons_with_the_ends_of_the_types(text: str, wanted: bool) -> None:
    assert np.all(evaluate(parse(text, Scope(), Type.BOOL), {"q_idx": np.arange(500), "kv_idx": 250}, {}) == wanted)
