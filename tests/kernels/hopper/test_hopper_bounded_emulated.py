"""Bounded scores in Hopper's forward without a GPU: bfloat16 weights that have no running maximum, and split `tanh`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from emulator import Timing, ptx
from generated._runtime.device import gl_capped
from tests.kernels.hopper.test_hopper_emulated import CALLS, EMPTY, Call, Sources, check_lse, emulate
from tests.support.cases import Shape, draw
from tests.support.rendering import importable

PACKAGE = "bounded_scores"
SPEC = """
variants:
  clamped: {mask: causal, score: "clamp(score, -9, 5)"}
  of_rows: {mask: causal, score: "softcap(9.0) + clamp(w[q_idx], -2, 2)", tensors: {w: {dims: [q_idx]}}}
  with_sink: {mask: causal, score: softcap(9.0), sink: true}
  dropped: {mask: causal, score: softcap(9.0), dropout: true}
"""
OWN: dict[str, dict[str, Any]] = {
    "of_rows": {"w": torch.linspace(-3, 3, 200)},
    # One sink within the range of the scores, and one far above what bfloat16 weights with a fixed reference can add.
    "with_sink": {"sink": torch.tensor([1.0, 200.0])},
    "dropped": {"dropout_p": 0.3, "seed": 7},
}
CAPPED, OWN_VARIANTS = ("softcap", "gemma2_local"), ("clamped", "of_rows", "with_sink", "dropped")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="forward", dtype="bfloat16", framework="torch"),
]


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("bounded_scores"), PACKAGE, SPEC) as folder:
        yield folder


@pytest.fixture(autouse=True)
def kernels_get_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get bfloat16, because only Triton's interpreter computes it wrongly, not the emulation."""
    for variant, package in [*((name, "generated") for name in CAPPED), *((name, PACKAGE) for name in OWN_VARIANTS)]:
        monkeypatch.setattr(f"{package}.{variant}.torch_op.interpreter_dtype", lambda q, k, v: (q, k, v))


def without_maxima(sources: Sources) -> Sources:
    """The same sources, changed so that computing a running maximum is an error."""
    return {**sources, "kernel": sources["kernel"].replace("raise_maximum(row_max, ", "no_maximum_here(")}


def check_call(inputs: Inputs, options: dict[str, Any], variant: str, package: str = "generated") -> None:
    """Compare o and lse with float64."""
    op, reference = golden.load_op(variant, package), golden.load_reference(variant, package=package)
    with torch.no_grad():
        o, lse = inputs.call(op, return_lse=True, family="hopper", **options)
        want, want_lse = inputs.double().call(reference, return_lse=True, **options)
    check_lse(lse, want_lse)
    check_rows(o, want, want_lse, inputs.q.dtype)


def check_rows(o: Tensor, want: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
    assert o.isfinite().all()
    assert (o[lse == EMPTY] == 0).all()
    error = (o.double() - want).abs().max().item()
    assert error <= golden.BOUND[dtype] * want.abs().max().item(), f"o: largest error {error:.1e}"


def drawn(call: Call, variant: str, dtype: torch.dtype) -> Inputs:
    return draw(variant, call.shape, dtype, positions=call.positions)


@pytest.mark.parametrize("name", ["cut blocks", "rows without keys", "an offset per row", "five blocks"])
@pytest.mark.parametrize("variant", CAPPED)
def test_weights_without_maxima(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, without_maxima)
    check_call(drawn(CALLS[name], variant, torch.bfloat16), CALLS[name].options(), variant)
    assert kernel.launches == 1


def test_float16_has_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "softcap", Timing.LATE_PRODUCTS, without_maxima)
    with pytest.raises(NameError, match="no_maximum_here"):
        check_call(drawn(CALLS["cut blocks"], "softcap", torch.float16), {}, "softcap")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", CAPPED)
def test_saturated_scores(monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype) -> None:
    """Rows whose scores are all at the lower end of the range, all at the upper end, or at both."""
    inputs = drawn(Call(shape=Shape(q_len=300, kv_len=300)), variant, dtype)
    q, k = 16 * inputs.q.abs(), inputs.k.abs()
    q[:, :, :100] *= -1
    k[:, :, 100:] *= torch.where(torch.arange(100, 300) % 3 == 0, -1, 1).to(dtype)[:, None]
    emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check_call(replace(inputs, q=q, k=k), {}, variant)


@pytest.mark.parametrize("variant", CAPPED)
@pytest.mark.parametrize("exponent", [60, -60])
def test_values_of_any_size(monkeypatch: pytest.MonkeyPatch, variant: str, exponent: int) -> None:
    inputs = drawn(CALLS["cut blocks"], variant, torch.bfloat16)
    emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check_call(replace(inputs, v=inputs.v * 2.0**exponent), {}, variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", OWN_VARIANTS)
def test_other_bounded_scores(monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 200, 64, generator=generator).to(dtype) for _ in range(3))
    q = 4 * q
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, package=PACKAGE)
    op, reference = golden.load_op(variant, PACKAGE), golden.load_reference(variant, package=PACKAGE)
    own = OWN.get(variant, {})
    o, lse = op(q, k, v, return_lse=True, family="hopper", **own)
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in own.items()}
    want, want_lse = reference(q.double(), k.double(), v.double(), return_lse=True, **exact)
    assert kernel.launches == 1
    check_lse(lse, want_lse)
    check_rows(o, want, want_lse, dtype)


# --------------------------------------------------------------------------------------- exponentials of a split tanh


def run_exponentials(x: Tensor, inner: float, factor: float, offset: float) -> Tensor:
    """Run the PTX lines for all numbers of each thread of a warp: `x` is [threads, numbers]."""
    count = x.shape[1]
    numbers = (gl_capped.POLYNOMIALS, gl_capped.COEFFICIENTS, gl_capped.MOST_SQUARE)
    text = gl_capped.exponential_ptx.fn(count, factor, offset, *(number.value for number in numbers))
    columns = list(x.unbind(1))
    inputs = columns + [torch.full_like(columns[0], inner)] * count
    return torch.stack(ptx.run(text, inputs, count, dict(enumerate(columns))), 1)


@pytest.mark.parametrize(("factor", "offset"), [(28.85, -20.85), (72.13, -27.86), (-3.5, 2.5)])
@pytest.mark.parametrize("largest", [0.6, 0.7, 30.0])
def test_exponentials_are_exact_near_and_far(largest: float, factor: float, offset: float) -> None:
    x = torch.empty(32, 16).uniform_(-largest, largest) * 8
    got = run_exponentials(x, 0.125, factor, offset)
    logit = factor * torch.tanh(0.125 * x.double())
    error = (got.double().log2() - offset - logit).abs()
    # The relative error of the polynomials, and float32's rounding of the logit, of its offset and of the weight.
    assert (error <= 2.0**-18 * logit.abs() + 2.0**-23 * (abs(factor) + abs(offset) + 2)).all()


def test_one_number_beyond_sends_a_warp_to_the_unit() -> None:
    x = torch.full((32, 16), 0.5)
    alone = run_exponentials(x, 1.0, 9.0, -1.0)
    x[31, 0] = 40.0
    beside = run_exponentials(x, 1.0, 9.0, -1.0)
    assert beside[31, 0] == 2.0**8
    assert torch.equal(beside[:31], torch.exp2(torch.tanh(x[:31]) * 9.0 - 1.0))
    assert not torch.equal(alone[:31], beside[:31])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", range(8))
def test_exponentials_of_no_number(bad: float, place: int) -> None:
    x = torch.zeros(32, 16)
    x[3, place] = bad
    got = run_exponentials(x, 0.5, 2.0, -1.0)
    assert got[3, place].isnan() if bad != bad else got[3, place] == 2.0 ** (2 * (1 if bad > 0 else -1) - 1)
    assert (got[0] == 0.5).all()
