"""A score is split into the sum of a part that differs between the keys of a row and a part that they share.

In some scores the row and the key add separate terms to the product.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen.analysis.call_modes import Mode
from codegen.analysis.score_split import NOTHING, Sides, split_rows, split_sides
from codegen.ir import expr
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr, Level, Type
from codegen.ir.parse import parse
from codegen.load.spec_file import load
from codegen.plan.code.statements import uses
from codegen.plan.kernel_files import fuses_backward
from codegen.plan.kernels.kernel import KernelPlan
from codegen.plan.variant import VariantPlan, plan
from codegen.spec.model import Variant
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, contents, texts

QUERIES, KEYS, START, ROW_START = 5, 7, 300, 290


def inputs(seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Variables and tensors: a block of keys from START on."""
    rng = np.random.default_rng(seed)
    variables = {
        "b": np.asarray(1),
        "h": np.asarray(2),
        "hkv": np.asarray(1),
        "q_len": np.asarray(9),
        "kv_len": np.asarray(13),
        "q_idx": np.arange(QUERIES)[:, None] + ROW_START,
        "kv_idx": np.arange(KEYS) + START,
        "start_n": np.asarray(START),
        "row_start": np.asarray(ROW_START),
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
    check_sum([of_pairs, of_rows], whole)


def check_sum(parts: list[Array], whole: Array) -> None:
    """The parts add up to the whole, up to their rounding errors."""
    scale = 1.0 + sum(np.abs(np.where(np.isfinite(part), part, 0.0)) for part in parts)
    np.testing.assert_allclose(sum(parts) / scale, whole / scale, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("score", "pairs", "rows"),
    [
        ("score + level[h] * (kv_idx - q_idx)", "level[h] * (kv_idx - start_n)", "level[h] * (start_n - q_idx)"),
        ("score - cap * (q_idx - kv_idx)", "cap * (start_n - kv_idx)", "cap * (q_idx - start_n)"),
        ("2.0 * (score + weight[h, q_idx])", "score", "weight[h, q_idx]"),
        ("score + weight[h, q_idx] - weight[h, kv_idx]", "weight[h, kv_idx]", "weight[h, q_idx]"),
    ],
)
def test_split_rows_hoists_row_terms(score: str, pairs: str, rows: str) -> None:
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
def test_split_rows_leaves_other_scores(score: str) -> None:
    e = read(score)
    assert split_rows(e) == (e, NOTHING)


@settings(deadline=None)
@given(text=texts("score", 4), seed=st.integers(0, 99))
def test_the_parts_of_any_positions_add_up(text: str, seed: int) -> None:
    try:
        e = read(text)
    except ExprError:
        reject()
    pairs, rows = split_rows(e, in_order=False)
    assert "start_n" not in expr.names(pairs) | expr.names(rows)
    assert not ("q_idx" in expr.names(rows) and "kv_idx" in expr.names(pairs)) or rows is NOTHING
    variables, tensors = inputs(seed)
    whole, of_pairs, of_rows = (evaluate(x, variables, tensors) for x in (e, pairs, rows))
    check_sum([of_pairs, of_rows], whole)


def test_distances_of_any_positions_stay_whole() -> None:
    """Of positions far from the block's start and near each other, rounding the parts would lose the difference."""
    e = read("score + level[h] * (kv_idx - q_idx)")
    assert split_rows(e, in_order=False) == (e, NOTHING)
    assert split_sides(e, SCORE, in_order=False) is None
    of_rows = split_sides(read("score + cap * q_idx"), SCORE, in_order=False)
    assert of_rows is not None
    assert expr.names(of_rows.rows) >= {"q_idx"}
    assert "row_start" not in expr.names(of_rows.rows)


SCORE = expr.float_var("score")


@settings(deadline=None)
@given(parts=st.tuples(texts("float", 2), texts("float", 2)), from_rows=st.booleans(), seed=st.integers(0, 99))
def test_the_sides_add_up(parts: tuple[str, str], from_rows: bool, seed: int) -> None:
    try:
        e = expr.sub(expr.add(SCORE, read(parts[0])), read(parts[1]))
    except ExprError:
        reject()
    sides = split_sides(e, SCORE, from_rows=from_rows)
    if sides is None:  # a term differs from pair to pair
        return
    assert not from_rows or sides.block == NOTHING
    assert expr.level(sides.keys) in (Level.UNIFORM, Level.KEY)
    assert expr.level(sides.rows) in (Level.UNIFORM, Level.QUERY)
    assert expr.level(sides.block) is Level.UNIFORM
    variables, tensors = inputs(seed)
    terms = (SCORE, sides.keys, sides.rows, sides.block)
    check_sum([evaluate(x, variables, tensors) for x in terms], evaluate(e, variables, tensors))


@pytest.mark.parametrize(
    ("score", "keys", "rows", "block"),
    [
        ("score", "", "", ""),
        ("score + cap", "", "", "cap"),
        ("score + weight[h, kv_idx]", "kv_idx", "", ""),
        ("score - weight[h, q_idx]", "", "q_idx", ""),
        ("score + level[h] * (kv_idx - q_idx)", "kv_idx - start_n", "q_idx - row_start", "start_n - row_start"),
        (
            "level[h] * (kv_idx - q_idx) + score + cap",
            "kv_idx - start_n",
            "q_idx - row_start",
            "start_n - row_start + cap",
        ),
    ],
)
def test_the_sides_of_a_score(score: str, keys: str, rows: str, block: str) -> None:
    check_sides(split_sides(read(score), SCORE), keys=keys, rows=rows, block=block)


@pytest.mark.parametrize(
    ("score", "keys", "rows"),
    [
        ("score + cap", "", "cap"),
        ("score + weight[h, kv_idx]", "kv_idx", ""),
        ("score + level[h] * (kv_idx - q_idx)", "kv_idx - row_start", "row_start - q_idx"),
        ("score + 2.0 * kv_idx - cap", "kv_idx - row_start", "row_start - cap"),
        ("score - level[h] * q_idx", "", "q_idx"),
    ],
)
def test_the_sides_of_a_score_counted_from_rows(score: str, keys: str, rows: str) -> None:
    check_sides(split_sides(read(score), SCORE, from_rows=True), keys=keys, rows=rows, block="")


def check_sides(sides: Sides | None, *, keys: str, rows: str, block: str) -> None:
    """Check which names each term reads."""
    assert sides is not None
    of_interest = {"q_idx", "kv_idx", "start_n", "row_start", "cap"}
    for part, holds in ((sides.keys, keys), (sides.rows, rows), (sides.block, block)):
        assert expr.names(part) & of_interest == {name for name in of_interest if name in holds.split()}
        assert bool(holds) != expr.is_const(part, 0)


@pytest.mark.parametrize(
    "score",
    [
        "cap",
        "2.0 * score",
        "score + score",
        "-score",
        "cap - score",
        "tanh(score)",
        "score * weight[h, kv_idx]",
        "score - abs(kv_idx - q_idx)",
        "score + weight[h, q_idx - kv_idx]",
        "where(q_idx > kv_idx, score, 0.0)",
    ],
)
def test_split_sides_refuses_other_scores(score: str) -> None:
    assert split_sides(read(score), SCORE) is None


BIASES = """
variants:
  biases:
    mask: causal
    score: score + bias[h, kv_idx] - row[h, q_idx]
    tensors: {bias: {dims: [h, kv_idx], grad: true}, row: {dims: [h, q_idx], grad: false}}
  trained_rows:
    score: score + row[h, q_idx]
    tensors: {row: {dims: [h, q_idx], grad: true}}
  forgotten: {mask: causal, decay: true}
  ordered: {score: score + cap * q_idx, scalars: {cap: float}}
"""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Variant]:
    path = tmp_path_factory.mktemp("spec") / "biases.yaml"
    path.write_text(BIASES)
    return load(path).variants


@pytest.fixture(scope="module")
def planned(variants: Mapping[str, Variant]) -> dict[str, VariantPlan]:
    return {name: plan(variant) for name, variant in variants.items()}


def pointers(kernel: KernelPlan) -> set[str]:
    return {name for group in kernel.args for name in group.names if name.endswith("_ptr")}


def test_a_term_of_rows_is_read_ahead_of_the_backward_alone(planned: dict[str, VariantPlan]) -> None:
    found = planned["biases"]
    assert pointers(found.hopper_delta) == {"row_ptr"}
    assert "row_ptr" not in pointers(found.hopper_bwd) >= {"bias_ptr", "dbias_cols_ptr"}
    assert found.hopper_bwd.has_offset, "its mask needs positions"
    assert not planned["trained_rows"].hopper_bwd.has_offset
    assert planned["trained_rows"].hopper_delta.has_offset


def test_a_decay_of_segmented_calls_counts_from_the_first_key_of_a_block(variants: Mapping[str, Variant]) -> None:
    """It counts by the places of keys, which are consecutive whatever their positions are."""
    found = plan(variants["forgotten"], Mode.SEGMENTED)
    assert found.hopper_bwd.linear
    assert "start_n" in uses(found.hopper_bwd.head_prologue)
    assert found.hopper_bwd.key_term
    assert found.hopper_bwd.block_term
    assert not found.hopper_delta.has_positions


def test_a_term_of_rows_reads_the_positions_of_a_call(variants: Mapping[str, Variant]) -> None:
    found = plan(variants["ordered"], Mode.SEGMENTED).hopper_delta
    assert pointers(found) == {"q_positions_ptr"}
    assert found.has_positions
    assert not plan(variants["ordered"], Mode.SEGMENTED).hopper_bwd.has_positions


def test_gradients_that_only_some_calls_want_are_no_products(planned: dict[str, VariantPlan]) -> None:
    decayed = planned["forgotten"].hopper_bwd
    assert [term.accumulator for term in decayed.row_sums + decayed.column_sums] == ["ddecay_rows", "ddecay_cols"]
    assert fuses_backward(planned["biases"])
    assert not planned["biases"].hopper_bwd.column_sums
    assert not fuses_backward(planned["trained_rows"])
