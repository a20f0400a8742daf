"""The ranges of distances that are taken out of a mask, and the rest of the mask, are together the mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from codegen.analysis.call_modes import Mode
from codegen.analysis.mask_ranges import RangedMask, split_ranges
from codegen.ir import expr
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr, Level, ScalarType, Type
from codegen.ir.parse import parse
from codegen.load.spec_file import load
from codegen.plan.variant import plan
from codegen.spec.model import ScalarSpec
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, contents, texts
from tests.support.paths import DEFAULT_SPEC, ROOT

QUERIES, KEYS = 9, 11
SCALARS = {"size": ScalarSpec(name="size", type=ScalarType.INT, minimum=1)}
UNBOUNDED = {"size": ScalarSpec(name="size", type=ScalarType.INT)}
MASKS = {
    f"{path}: {name}": variant
    for path in ("variants.yaml", "library.yaml")
    for name, variant in load(ROOT / path).variants.items()
    if variant.mask is not None
}


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
        "size": np.asarray(rng.integers(1, 9)),
        "cap": np.asarray(rng.normal()),
    }
    return variables, contents(rng, 2, 3, 16)


def check(mask: Expr, found: RangedMask, variables: dict[str, Array], tensors: dict[str, Array]) -> None:
    kept = [evaluate(found.rest, variables, tensors)]
    for part in found.ranges:
        distance, count = (evaluate(e, variables, tensors) for e in (part.distance, part.count))
        kept.append(distance.astype(np.int32).view(np.uint32) < np.uint32(count))
    want, *got = np.broadcast_arrays(evaluate(mask, variables, tensors), *kept, np.ones((QUERIES, KEYS)))[:-1]
    np.testing.assert_array_equal(np.logical_and.reduce(got), want)


@settings(deadline=None)
@given(text=texts("mask", 4), other=texts("mask", 3), seed=st.integers(0, 99))
def test_the_parts_are_the_mask(text: str, other: str, seed: int) -> None:
    try:
        mask = read(f"({text}) and ({other}) and q_idx - kv_idx <= size and kv_idx < q_idx + 2")
    except ExprError:  # a constant folds to more than 32 bits
        reject()
    check(mask, split_ranges(mask, SCALARS), *inputs(seed))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("kv_idx <= q_idx and q_idx - kv_idx < size", "size"),
        ("q_idx - kv_idx < size and kv_idx <= q_idx", "size"),
        ("kv_idx < q_idx and kv_idx > q_idx - 8", "7"),
        ("abs(q_idx - kv_idx) <= size", "2 * size + 1"),
        ("abs(kv_idx % 4 - min(q_idx // 2, 3)) < 3", "5"),
        ("-(kv_idx - q_idx) >= 2 and kv_idx - q_idx >= -2", "1"),
    ],
)
def test_split_ranges_takes_both_sides_of_a_distance(text: str, count: str) -> None:
    found = split_ranges(read(text), SCALARS)
    assert found.rest == expr.TRUE
    (part,) = found.ranges
    assert part.count == parse(count, SCOPE, Type.INT)
    assert expr.level(part.distance) is Level.TILE
    for seed in range(20):
        check(read(text), found, *inputs(seed))


@pytest.mark.parametrize(
    "text",
    [
        "kv_idx <= q_idx",
        "kv_idx <= q_idx and q_idx - kv_idx < size - 2",  # may be less than 0
        "kv_idx <= q_idx and q_idx - kv_idx < 5 - size",
        "kv_idx <= q_idx and 2 * q_idx - kv_idx < size",
        "kv_idx <= place[q_idx] and place[q_idx] - kv_idx < size",  # a tensor's difference may exceed 32 bits
        "kv_idx + q_idx >= 0 and kv_idx + q_idx < size",
        "abs(q_idx - kv_idx) >= 2",
        "q_idx - kv_idx <= size and q_idx - kv_idx <= 5",
    ],
)
def test_split_ranges_leaves_what_is_no_range(text: str) -> None:
    mask = read(text)
    assert split_ranges(mask, SCALARS) == RangedMask(rest=mask)


def test_a_scalar_without_minimum_bounds_no_range() -> None:
    mask = read("kv_idx <= q_idx and q_idx - kv_idx < size")
    assert split_ranges(mask, UNBOUNDED) == RangedMask(rest=mask)
    assert split_ranges(None, SCALARS) == RangedMask(rest=expr.TRUE)


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_library(name: str) -> None:
    """Each mask is split or left whole; that its parts are the mask, `test_the_parts_are_the_mask` evaluates."""
    variant = MASKS[name]
    found = split_ranges(variant.mask, variant.scalars)
    assert found.ranges or found.rest == variant.mask


def test_kernels_that_gather_gradients_read_the_whole_mask() -> None:
    for name, backward in (("window", True), ("gemma2_local", False)):
        for mode in Mode:
            kernels = plan(load(DEFAULT_SPEC).variants[name], mode)
            for kernel, ranged in ((kernels.fwd, True), (kernels.dq, backward), (kernels.dkdv, backward)):
                assert kernel.partial is not None
                assert bool(kernel.partial.ranges) is ranged
                assert ("PTX" in kernel.constants) is ranged


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("kv_idx <= q_idx and q_idx - kv_idx < 128", 128),
        ("abs(q_idx - kv_idx) <= 6 and q_idx - kv_idx < 40 and q_idx >= kv_idx", 13),
        ("kv_idx <= q_idx and q_idx - kv_idx < size", None),
        ("abs(q_idx // 8 - kv_idx // 8) <= 2", None),  # a distance of blocks, not of positions
        ("kv_idx <= q_idx", None),
    ],
)
def test_band_is_the_narrowest_of_fixed_width(text: str, band: int | None) -> None:
    assert split_ranges(read(text), SCALARS).band == band


def test_a_narrow_band_is_visited_in_one_loop() -> None:
    spec = load(DEFAULT_SPEC)
    for name, one_loop in (("gpt_oss", True), ("window", False), ("gemma2_local", False), ("causal", False)):
        kernels = plan(spec.variants[name])
        for kernel in (kernels.fwd, kernels.dq, kernels.dkdv):
            assert kernel.bounds is not None
            assert kernel.bounds.has_full is not one_loop
