"""The run of positions that is taken out of a mask, and the rest of the mask, are together the mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen.analysis.call_modes import Mode
from codegen.analysis.mask_runs import Limits, split_limits
from codegen.ir import expr
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr, Level, Type
from codegen.ir.parse import parse
from codegen.load.spec_file import load
from codegen.plan.variant import plan
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, contents, texts
from tests.support.paths import DEFAULT_SPEC, ROOT

QUERIES, KEYS = 9, 11
MASKS = {
    f"{path}: {name}": variant.mask
    for path in ("variants.yaml", "library.yaml")
    for name, variant in load(ROOT / path).variants.items()
    if variant.mask is not None
}
ALONG = ("kv_idx", "q_idx")


def read(text: str) -> Expr:
    return parse(text, SCOPE, Type.BOOL)


def inputs(seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    rng = np.random.default_rng(seed)
    variables = {
        "b": np.asarray(1),
        "h": np.asarray(2),
        "hkv": np.asarray(1),
        "q_len": np.asarray(9),
        "kv_len": np.asarray(13),
        "q_idx": np.arange(QUERIES)[:, None] + rng.integers(-3, 6),
        "kv_idx": np.arange(KEYS)[None, :],
        "size": np.asarray(rng.integers(-5, 9)),
        "cap": np.asarray(rng.normal()),
    }
    return variables, contents(rng, 2, 3, 16)


def check(mask: Expr, limits: Limits, along: str, variables: dict[str, Array], tensors: dict[str, Array]) -> None:
    kept = [evaluate(limits.own, variables, tensors), evaluate(limits.rest, variables, tensors)]
    if limits.first is not None:
        kept.append(variables[along] >= evaluate(limits.first, variables, tensors))
    if limits.end is not None:
        kept.append(variables[along] < evaluate(limits.end, variables, tensors))
    if limits.gap_first is not None and limits.gap_end is not None:
        ahead = variables[along] < evaluate(limits.gap_first, variables, tensors)
        kept.append(ahead | (variables[along] >= evaluate(limits.gap_end, variables, tensors)))
    want, *got = np.broadcast_arrays(evaluate(mask, variables, tensors), *kept, np.ones((QUERIES, KEYS)))[:-1]
    np.testing.assert_array_equal(np.logical_and.reduce(got), want)


def check_levels(limits: Limits, along: str) -> None:
    other = Level.QUERY if along == "kv_idx" else Level.KEY
    assert all(expr.level(e) in (other, Level.UNIFORM) for e in limits.all)


@pytest.mark.parametrize("along", ALONG)
@settings(deadline=None)
@given(text=texts("mask", 4), seed=st.integers(0, 99))
def test_the_parts_are_the_mask(along: str, text: str, seed: int) -> None:
    try:
        mask = read(text)
    except ExprError:  # a constant folds to more than 32 bits
        reject()
    limits = split_limits(mask, along)
    check_levels(limits, along)
    check(mask, limits, along, *inputs(seed))


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("kv_idx <= q_idx", "end"),
        ("kv_idx <= q_idx and q_idx - kv_idx < size", "first end"),
        ("abs(q_idx - kv_idx) <= size", "first end"),
        ("kv_idx // 4 == q_idx // 4", "first end"),
        ("kv_idx <= q_idx or kv_idx < size", "end"),
        ("kv_idx < place[q_idx] and place[q_idx] > 2", "end"),
        ("min(max(q_idx, 2), size) <= kv_idx", "first"),
        ("kv_idx <= q_idx or q_idx < size", "end"),
        ("q_idx - kv_idx < size or place[q_idx] > 2", "first"),
        ("kv_idx <= q_idx and (q_idx - kv_idx < size or kv_idx < 4)", "end gap_first gap_end"),
        ("kv_idx <= q_idx and (q_idx - kv_idx < size or kv_idx < 4 or q_idx == 5)", "end gap_first gap_end"),
    ],
)
def test_runs_of_keys(text: str, sides: str) -> None:
    limits = split_limits(read(text), "kv_idx")
    found = {side: getattr(limits, side) for side in ("first", "end", "gap_first", "gap_end")}
    assert [side for side, limit in found.items() if limit is not None] == sides.split()
    assert limits.rest == expr.TRUE
    for seed in range(20):
        check(read(text), limits, "kv_idx", *inputs(seed))


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize(
    "text",
    [
        "{0} <= place[{1}]",
        "{0} > place[{1}] and {0} < 9",
        "{0} // 64 <= place[{1}]",
        "{1} - {0} < place[{1}]",
        "{0} - {1} <= place[{1}]",
        "{0} // 1000 <= {1}",
    ],
)
def test_limits_fit_32_bits(text: str, along: str) -> None:
    """An element of a tensor may be the largest integer, and positions may be large."""
    mask = read(text.format(along, "q_idx" if along == "kv_idx" else "kv_idx"))
    limits = split_limits(mask, along)
    assert limits.found
    variables, tensors = inputs(0)
    variables |= {name: variables[name].astype(np.int32) for name in ALONG}
    for place, shift in ((2**31 - 1, 0), (2**31 - 9, 0), (3, 3_000_000), (3, 0)):
        moved = np.int32(shift)
        own = {**tensors, "place": np.full(16, place, np.int32)}
        values = {**variables, **{n: variables[n] + moved for n in ALONG if n != along}}
        check(mask, limits, along, values, own)
        for node in (node for e in limits.all for node in expr.walk(e) if node.type is Type.INT):
            assert np.abs(evaluate(node, values, own).astype(np.int64)).max() < 2**31


def test_split_limits_makes_one_gap() -> None:
    text = "kv_idx <= q_idx and (q_idx - kv_idx < size or kv_idx < 4) and (kv_idx < 2 or kv_idx > size)"
    limits = split_limits(read(text), "kv_idx")
    assert limits.gap_end is not None
    assert limits.rest == read("kv_idx < 2 or kv_idx > size")


def test_split_limits_leaves_what_is_no_run() -> None:
    for text in ("kv_idx % 2 == 0", "kv_idx != q_idx", "kv_idx < q_idx or kv_idx > size + q_idx"):
        mask = read(text)
        assert split_limits(mask, "kv_idx") == Limits(rest=mask)


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_library(name: str, along: str) -> None:
    """Each mask is split or left whole; that its parts are the mask, `test_the_parts_are_the_mask` evaluates."""
    limits = split_limits(MASKS[name], along)
    check_levels(limits, along)
    assert limits.found or limits.rest == MASKS[name]


def test_positions_of_a_call_are_no_columns() -> None:
    """With positions of a call, adjacent keys may have any positions: a run of positions is no run of columns."""
    variant = load(DEFAULT_SPEC).variants["window"]
    for mode in Mode:
        for kernel in (plan(variant, mode).hopper_fwd, plan(variant, mode).hopper_bwd):
            assert kernel.partial is not None
            assert (kernel.partial.run is None) == (mode is Mode.SEGMENTED)
    portable = plan(variant).fwd.partial
    assert portable is not None
    assert portable.run is None
