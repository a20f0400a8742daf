"""A score is the sum of what differs between the keys of a row and of what they share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen import expr
from codegen.errors import ExprError
from codegen.evaluate import Array, evaluate
from codegen.expr import Expr, Level, Type
from codegen.parse import parse
from codegen.rows import NOTHING, split_rows
from tests.expressions import SCOPE, contents, texts

QUERIES, KEYS, START = 5, 7, 300


def inputs(seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Variables and tensors: a block of keys from START on."""
    rng = np.random.default_rng(seed)
    variables = {
        "b": np.asarray(1),
        "h": np.asarray(2),
        "hkv": np.asarray(1),
        "q_idx": np.arange(QUERIES)[:, None] + 290,
        "kv_idx": np.arange(KEYS) + START,
        "start_n": np.asarray(START),
        "size": np.asarray(rng.integers(-5, 9)),
        "cap": np.asarray(rng.normal()),
        "score": rng.normal(size=(QUERIES, KEYS)),
    }
    return variables, contents(rng, 2, 3, START + KEYS)


def read(text: str) -> Expr:
    return parse(text, SCOPE, Type.FLOAT)


@settings(deadline=None)
@given(text=texts("score", 4), seed=st.integers(0, 99))
def test_the_parts_add_up(text: str, seed: int) -> None:
    try:
        e = read(text)
    except ExprError:  # a constant folds to more than 32 bits
        reject()
    pairs, rows = split_rows(e)
    assert rows is NOTHING or expr.level(rows) is Level.QUERY
    variables, tensors = inputs(seed)
    whole, of_pairs, of_rows = (evaluate(x, variables, tensors) for x in (e, pairs, rows))
    scale = (
        1.0
        + np.abs(np.where(np.isfinite(of_pairs), of_pairs, 0.0))
        + np.abs(np.where(np.isfinite(of_rows), of_rows, 0.0))
    )
    np.testing.assert_allclose((of_pairs + of_rows) / scale, whole / scale, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("score", "pairs", "rows"),
    [
        ("score + level[h] * (kv_idx - q_idx)", "level[h] * (kv_idx - start_n)", "level[h] * (start_n - q_idx)"),
        ("score - cap * (q_idx - kv_idx)", "cap * (start_n - kv_idx)", "cap * (q_idx - start_n)"),
        ("2.0 * (score + weight[h, q_idx])", "score", "weight[h, q_idx]"),
        ("score + weight[h, q_idx] - weight[h, kv_idx]", "weight[h, kv_idx]", "weight[h, q_idx]"),
    ],
)
def test_what_is_split(score: str, pairs: str, rows: str) -> None:
    found = split_rows(read(score))
    for part, holds in zip(found, (pairs, rows), strict=True):
        names = {word for word in ("q_idx", "kv_idx", "start_n") if word in holds}
        assert expr.names(part) & {"q_idx", "kv_idx", "start_n"} == names
    assert "score" in expr.names(found[0])


@pytest.mark.parametrize(
    "score",
    [
        "score",
        "score + weight[h, kv_idx]",
        "score + cap * kv_idx",
        "tanh(score + level[h] * (kv_idx - q_idx))",
        "score * (kv_idx - q_idx)",
        "score - abs(kv_idx - q_idx)",
    ],
)
def test_what_is_left_as_it_is(score: str) -> None:
    e = read(score)
    assert split_rows(e) == (e, NOTHING)
