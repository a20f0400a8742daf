"""Block analysis compared with every pair of a block: it may leave a block undecided, but may not be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from codegen.analysis.intervals import decide
from codegen.analysis.schedule import analyse
from codegen.inspect.block_status import Grid, Status, counted, decided, measured, proven
from codegen.inspect.call import Call, make_call
from codegen.inspect.show import mask_of
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import BLOCK_ENDS, Expr, Type, walk
from codegen.ir.parse import parse
from codegen.load.spec_file import default_spec_path, load
from codegen.spec.model import Variant
from codegen.util.errors import ExprError
from tests.support.expressions import SCOPE, TENSORS, texts

DEFAULT_VARIANTS = load(default_spec_path()).variants

FLOATS = (0.0, 0.5, -1.5, 3.0, 1e30, float("inf"), float("-inf"), float("nan"))
DRAWN = {"int32": st.integers(-4, 24), "float32": st.sampled_from(FLOATS), "bool": st.booleans()}

# Drawing a mask and the tensors it reads takes hypothesis longer than the test itself.
DRAWING = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Calls of few positions, with longer and shorter tensors, and with scalars beyond all sensible values."""
    q_len, kv_len = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    sizes = {"b": 2, "h": 4, "kv_idx": draw(st.integers(1, 50))}

    def tensor(name: str) -> Array:
        spec = TENSORS[name]
        shape = tuple(sizes[str(dim)] for dim in spec.dims)
        runs, length = draw(st.lists(DRAWN[spec.dtype], min_size=1, max_size=8)), draw(st.integers(1, 12))
        return np.resize(np.repeat(np.array(runs, dtype=spec.dtype), length), shape)

    return Call(
        q_len=q_len,
        kv_len=kv_len,
        q_offset=draw(st.integers(-20, 40)),
        b=draw(st.integers(0, 1)),
        h=draw(st.integers(0, 3)),
        hkv=draw(st.integers(0, 1)),
        scalars={"size": draw(st.integers(-20, 40)), "cap": draw(st.sampled_from(FLOATS))},
        tensors={name: tensor(name) for name in TENSORS},
    )


def grids(of: st.SearchStrategy[Call]) -> st.SearchStrategy[Grid]:
    block = st.integers(1, 20)
    return st.builds(Grid, call=of, block_m=block, block_n=block)


def check(mask: Expr, grid: Grid) -> None:
    """Check that everything that is proven of a block holds for each of its pairs."""
    found = measured(counted(mask, grid), grid)
    may, must = decided(mask, grid)
    assert not found[~may].any(), "EMPTY was proven of a block that keeps a pair"
    assert (found[must] == Status.FULL).all(), "FULL was proven of a block that lacks a pair"


@DRAWING
@given(text=texts("mask", 4), grid=grids(calls()))
def test_nothing_wrong_is_proven_of_a_random_mask(text: str, grid: Grid) -> None:
    try:
        mask = parse(text, SCOPE, Type.BOOL)
    except ExprError:  # a constant folds to more than 32 bits
        reject()
    check(mask, grid)


# Masks on which an earlier analysis was wrong, or on which errors are likely.
ODD_MASKS = [
    "weight[h, kv_idx] >= cap",
    "weight[h, kv_idx] <= -cap",
    "not weight[h, kv_idx] < cap",
    "weight[h, kv_idx] != weight[h, q_idx]",
    "weight[h, q_idx] - weight[h, kv_idx] <= cap",
    "abs(weight[h, q_idx] - weight[h, kv_idx]) >= 0",
    "max(weight[h, q_idx] - weight[h, kv_idx], 0.5) >= 0",
    "weight[h, q_idx] < max(weight[h, q_idx] * weight[h, q_idx] + level[h], q_idx)",
    "cap <= min(max(level[h], weight[h, q_idx] * level[h]), q_idx)",
    "where(q_idx > 9, weight[h, kv_idx] + cap, 0.5) - where(kv_idx > 4, level[h] + weight[h, q_idx], 0) <= cap",
    "q_idx // (abs(size) + 1) == kv_idx // (abs(size) + 1)",
    "(q_idx - kv_idx) % (-1 - abs(size)) == 0",
    "size * q_idx >= kv_idx",
]


def odd_masks() -> Iterator[tuple[str, float, int]]:
    """Each mask with each number that it reads: `x`, elements that are NaN or an infinity in turn, and `size`."""
    for text in ODD_MASKS:
        xs = FLOATS if "weight" in text or "level" in text else FLOATS[:1]
        for x, size in product(xs, (-5, 0, 1, 7) if "size" in text else (1,)):
            yield text, x, size


@pytest.mark.parametrize(("text", "x", "size"), list(odd_masks()))
def test_nothing_wrong_is_proven_of_a_nan_an_infinity_or_a_negative_scalar(text: str, x: float, size: int) -> None:
    weight = np.linspace(-2, 2, 4 * 30).reshape(4, 30).astype(np.float32)
    weight[:, 7] = x
    tensors = {"weight": weight, "level": np.full(4, x, dtype=np.float32)}
    for cap in FLOATS:
        scalars = {"size": size, "cap": cap}
        call = Call(q_len=21, kv_len=30, q_offset=5, b=0, h=3, hkv=0, scalars=scalars, tensors=tensors)
        for block in (1, 4, 16):
            check(parse(text, SCOPE, Type.BOOL), Grid(call=call, block_m=block, block_n=block))


@pytest.mark.parametrize("order", ["<", "==", ">="])
@pytest.mark.parametrize("operator", ["&", "|", "^", "<<", ">>"])
def test_nothing_wrong_is_proven_of_bits(operator: str, order: str) -> None:
    """All pairs of blocks of four numbers around zero; results are compared with every value that they may have."""
    call = Call(q_len=16, kv_len=16, q_offset=-8, b=0, h=0, hkv=0, scalars={"size": 3, "cap": 0.0}, tensors={})
    grid = Grid(call=call, block_m=4, block_n=4)
    right = "size" if operator in ("<<", ">>") else "(kv_idx - 8)"
    for left, other in ((f"(q_idx {operator} {right})", "kv_idx"), (f"((kv_idx - 7) {operator} -4)", "q_idx")):
        for bound in range(-17, 17):
            if operator not in ("<<", ">>") or other == "kv_idx":
                check(parse(f"{left} {order} {bound}", SCOPE, Type.BOOL), grid)
        if operator not in ("<<", ">>") or other == "kv_idx":
            check(parse(f"{left} {order} {other}", SCOPE, Type.BOOL), grid)


@pytest.mark.parametrize("text", ["(q_idx ^ kv_idx) < 16", "(q_idx ^ kv_idx) >= 0", "abs(q_idx - kv_idx) // 2 > 5"])
def test_bounds_of_far_positions_fit_32_bits(text: str) -> None:
    """A call gives positions in any order, up to 2**30 either way."""
    mask = parse(text, SCOPE, Type.BOOL)
    known = decide(mask)
    far = (-(2**30), -7, 0, 5, 2**30 - 1)
    blocks = [(first, last) for first in far for last in far if first <= last]
    for q in blocks:
        for kv in blocks:
            ends = dict(zip(BLOCK_ENDS, map(np.asarray, (*q, *kv)), strict=True))
            for node in (node for e in (known.may, known.must) for node in walk(e) if node.type is Type.INT):
                assert -(2**31) <= evaluate(node, ends, {}) < 2**31
            kept = evaluate(mask, {"q_idx": np.asarray(q)[:, None], "kv_idx": np.asarray(kv)}, {})
            assert evaluate(known.may, ends, {}) or not kept.any()
            assert not evaluate(known.must, ends, {}) or kept.all()


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("closed_form", "q_idx >= kv_idx and kv_idx >= kv_len - 4"),
        ("closed_form", "q_idx >= kv_idx and (kv_idx < 4 or kv_idx >= kv_len - size)"),
        ("closed_form", "q_idx < q_len - size"),
        ("closed_form", "(q_idx >> 6) == (kv_idx >> 6)"),
        ("closed_form", "(q_idx & ~63) >= kv_idx << 1"),
        ("closed_form", "kv_idx // 16 in (2, 5)"),
        ("closed_form", "(q_idx >= kv_idx) == (q_idx < 9)"),
        ("lists", "kv_idx // 16 in (q_idx // 16, place[q_idx // 16])"),
        ("ranges", "doc[b, q_idx] == doc[b, kv_idx]"),
        ("ranges", "q_idx >= kv_idx and q_idx - kv_idx < size and doc[b, kv_idx] == doc[b, q_idx]"),
        ("ranges", "(q_idx >= kv_idx or kv_idx < size) and doc[b, kv_idx] == doc[b, q_idx]"),
        ("ranges", "doc[b, q_idx] == doc[b, kv_idx] and doc[b, kv_idx] != -1 and place[q_idx] >= 0"),
        ("ranges", "doc[b, q_idx] == place[kv_idx] + 1 and q_idx >= kv_idx"),
        ("ranges", "doc[b, q_idx // 4] // 2 == doc[b, kv_idx // 4] // 2"),
        ("ranges", "kv_idx < place[q_idx]"),
        ("ranges", "place[kv_idx] <= place[q_idx] and place[q_idx] - place[kv_idx] < size"),
        ("ranges", "weight[h, kv_idx] <= weight[h, q_idx]"),
        ("ranges", "q_idx // size == kv_idx // size"),
        ("ranges", "kv_idx < place[doc[b, q_idx]]"),
        # A mask may leave out many keys between its first and its last one, so one range is not enough.
        ("lists", "flag[kv_idx]"),
        ("lists", "doc[b, kv_idx] != 0"),
        ("lists", "doc[b, kv_idx] != 0 and kv_idx < place[q_idx]"),
        ("lists", "doc[b, q_idx] == doc[b, kv_idx] and flag[kv_idx]"),
        ("lists", "doc[b, q_idx] != doc[b, kv_idx]"),
        ("lists", "place[q_idx] == kv_idx"),
        ("lists", "q_idx < place[kv_idx]"),
        ("lists", "doc[b, q_idx] % 4 == doc[b, kv_idx] % 4"),
        ("lists", "doc[b, q_idx % 16] == doc[b, kv_idx % 16]"),
        ("lists", "doc[b, q_idx] == doc[b, kv_idx] or doc[b, kv_idx] == 0"),
        ("lists", "q_idx >= kv_idx and (q_idx - kv_idx < size or kv_idx < 4) and doc[b, q_idx] == doc[b, kv_idx]"),
        ("lists", "abs(doc[b, q_idx] - doc[b, kv_idx]) >= size"),
    ],
)
def test_masks_whose_visited_blocks_normally_are_one_run_have_ranges(schedule: str, text: str) -> None:
    assert analyse(parse(text, SCOPE, Type.BOOL)).schedule == schedule


# ---------------------------------------------------------------------------------------------------------- the library


@st.composite
def library_calls(draw: st.DrawFn, variant: Variant) -> Call:
    """Any lengths, scalars and tensors: the tensors hold documents and segments, or random values."""
    call = make_call(
        variant,
        q_len=draw(st.integers(1, 40)),
        kv_len=draw(st.integers(1, 40)),
        q_offset=draw(st.integers(-20, 40)),
        batch=0,
        head=draw(st.integers(0, 3)),
        scalars={},
        files={},
    )
    call = replace(call, scalars={name: draw(st.integers(-20, 40)) for name in variant.scalars})
    tensors = {
        name: np.array(draw(st.lists(DRAWN[spec.dtype], min_size=tensor.size, max_size=tensor.size)))
        .astype(spec.dtype)
        .reshape(tensor.shape)
        for name, spec in variant.tensors.items()
        if (tensor := call.tensors[name]).size < 500
    }
    return replace(call, tensors={**call.tensors, **tensors}) if draw(st.booleans()) else call


MASKED = [name for name, variant in DEFAULT_VARIANTS.items() if variant.mask is not None]


@settings(DRAWING, max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("name", MASKED)
def test_nothing_wrong_is_proven_of_the_library(name: str, data: st.DataObject) -> None:
    check(mask_of(DEFAULT_VARIANTS[name]), data.draw(grids(library_calls(DEFAULT_VARIANTS[name]))))


# Bounds cannot decide whether two tokens are of one image: a block without such a pair may be computed.
@pytest.mark.parametrize("name", [name for name in MASKED if name != "band_images"])
def test_every_block_of_the_library_is_decided(name: str) -> None:
    """A kernel visits only blocks that have a kept pair, and evaluates the mask only in partial blocks."""
    variant = DEFAULT_VARIANTS[name]
    call = make_call(variant, q_len=4096, kv_len=4096, q_offset=0, batch=0, head=0, scalars={}, files={})
    grid = Grid(call=call, block_m=128, block_n=128)
    mask = mask_of(variant)
    exact = measured(counted(mask, grid), grid) == proven(mask, grid)
    print(f"{name}: {exact.mean():.1%} of the blocks decided")
    assert exact.all()
