"""Every variant, forward and every gradient, over lengths, head_dims, head groups, dtypes and magnitudes."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import (
    DTYPES,
    FRAMEWORKS,
    INTERPRET,
    MANIFEST,
    OWN_TENSORS,
    VARIANTS,
    Shape,
    draw,
    tiles,
    variants_where,
    with_dtypes,
    with_frameworks,
    with_variants,
)
from tests.support.judge import check_call

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

# Head groups 1, 3, 4, 6 and 8 are combined with short lengths, which the interpreter computes fast.
LENGTHS = [
    Shape(q_len=1, batch=2),
    Shape(q_len=17, group=8),
    Shape(q_len=63, group=6),
    Shape(q_len=127, group=4),
    Shape(q_len=129, group=3),
    Shape(q_len=255, group=1),
    Shape(q_len=5, kv_len=300, kv_heads=2, group=1),
    Shape(q_len=300, kv_len=5, kv_heads=2, group=1),
]
LONG = [
    Shape(q_len=1000, batch=2, kv_heads=2, group=3),
    Shape(q_len=1023, batch=2, kv_heads=2, group=4),
    # Longer than the widest window of the library, 4096.
    Shape(q_len=4609, group=1),
]
DIMS = [16, 40, 80, 96, 128, 192, 256]
DIM_PAIRS = [(64, 128), (192, 128), (40, 16)]
# Head dims for which q and k, v, or both are in two parts of columns; some second parts are not full.
IN_PARTS = [(72, 72), (48, 48), (96, 80), (64, 96)]


def _dtypes_of(number: int) -> tuple[torch.dtype, ...]:
    """In the interpreter one dtype in turn: there the dtype only decides how results are rounded."""
    return (DTYPES[number % len(DTYPES)],) if INTERPRET else DTYPES


@pytest.mark.parametrize(
    ("variant", "shape", "dtype"),
    [
        pytest.param(variant, shape, dtype, id=f"{variant}-{shape}-{str(dtype)[6:]}")
        for row, variant in enumerate(VARIANTS)
        for column, shape in enumerate(LENGTHS)
        for dtype in _dtypes_of(row + column)
    ],
)
def test_lengths_and_groups(variant: str, shape: Shape, dtype: torch.dtype) -> None:
    check_call(variant, draw(variant, shape, dtype))


@pytest.mark.parametrize("shape", LENGTHS[1::3], ids=str)
@with_variants
@pytest.mark.covers(framework="jax")
def test_lengths_and_groups_in_jax(variant: str, shape: Shape) -> None:
    check_call(variant, draw(variant, shape, DTYPES[0]), framework="jax")


@pytest.mark.gpu
@with_dtypes
@pytest.mark.parametrize("shape", LONG, ids=str)
@with_variants
def test_long(variant: str, shape: Shape, dtype: torch.dtype) -> None:
    check_call(variant, draw(variant, shape, dtype))


@pytest.mark.gpu
@with_variants
@pytest.mark.covers(framework="jax")
def test_long_in_jax(variant: str) -> None:
    check_call(variant, draw(variant, LONG[-1], DTYPES[0]), framework="jax")


def _dims_of(variant: str) -> list[int]:
    """Every other head_dim for each variant, in turn: half of the variants cover each head_dim, in half the time."""
    return DIMS[VARIANTS.index(variant) % 2 :: 2]


@pytest.mark.parametrize(
    ("variant", "dim", "dtype"),
    [
        pytest.param(variant, dim, DTYPES[i % len(DTYPES)], id=f"{variant}-{dim}-{str(DTYPES[i % len(DTYPES)])[6:]}")
        for row, variant in enumerate(VARIANTS)
        for i, dim in enumerate(_dims_of(variant), row // 2)
    ],
)
def test_head_dims(variant: str, dim: int, dtype: torch.dtype) -> None:
    check_call(variant, draw(variant, Shape(q_len=70 if INTERPRET else 200, dim=dim), dtype))


@pytest.mark.parametrize(("dim", "dim_v"), DIM_PAIRS)
@with_variants
def test_values_of_another_head_dim(variant: str, dim: int, dim_v: int) -> None:
    check_call(variant, draw(variant, Shape(q_len=70, dim=dim, dim_v=dim_v), DTYPES[0]))


@pytest.mark.parametrize(("dim", "dim_v"), [*DIM_PAIRS, (20, 20)])
@pytest.mark.parametrize("variant", ["causal", "alibi"])
@pytest.mark.covers(framework="jax")
def test_head_dims_in_jax(variant: str, dim: int, dim_v: int) -> None:
    """Some head dims give rows that are no multiple of 16 bytes, so that inputs are copied."""
    check_call(variant, draw(variant, Shape(q_len=70, dim=dim, dim_v=dim_v), DTYPES[0]), framework="jax")


@with_frameworks
@pytest.mark.parametrize(("dim", "dim_v"), IN_PARTS)
@pytest.mark.parametrize("variant", ["gpt_oss", "relative_bias", "document", "forgetting", "causal_dropout"])
def test_head_dims_in_parts(variant: str, dim: int, dim_v: int, framework: str) -> None:
    inputs = draw(variant, Shape(q_len=70, group=1, dim=dim, dim_v=dim_v), DTYPES[0])
    check_call(variant, inputs, framework=framework)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 32), pytest.param(80, 80, marks=pytest.mark.gpu)])
@with_variants
def test_tiles_of_several_widths_without_a_pipeline(variant: str, dim: int, dim_v: int) -> None:
    """One stage: only then do k and v reach shared memory through registers, in these tests."""
    check_call(variant, draw(variant, Shape(q_len=70, dim=dim, dim_v=dim_v), DTYPES[0]), config=tiles(64, 64))


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [(framework, dtype) for row, framework in enumerate(FRAMEWORKS) for dtype in _dtypes_of(row)],
)
@pytest.mark.parametrize("variant", variants_where(lambda name: any(MANIFEST[name][key] for key in OWN_TENSORS)))
def test_own_gradients(variant: str, framework: str, dtype: torch.dtype) -> None:
    """Enough heads that the mean error of a gradient per head is meaningful."""
    inputs = draw(variant, Shape(q_len=70, kv_heads=4, group=8), dtype)
    check_call(variant, inputs, config=tiles(128, 128), framework=framework)


@with_dtypes
@pytest.mark.parametrize("magnitude", [1e-3, 1e2])
@with_variants
def test_magnitudes(variant: str, magnitude: float, dtype: torch.dtype) -> None:
    check_call(variant, draw(variant, Shape(q_len=100), dtype, magnitude=magnitude))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (64, 16), (32, 128), (128, 32)])
@with_variants
def test_tiles(variant: str, block_m: int, block_n: int) -> None:
    check_call(variant, draw(variant, Shape(q_len=140 if INTERPRET else 200, group=1)), config=tiles(block_m, block_n))


@with_variants
def test_tiles_of_one_pass(variant: str) -> None:
    config = {"dq": tiles(32, 32)["dq"]}
    check_call(variant, draw(variant, Shape(q_len=100)), config=config)
