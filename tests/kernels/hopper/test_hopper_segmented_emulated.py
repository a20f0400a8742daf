"""Segmented calls of Hopper's family and their gradients without a GPU; `test_hopper_emulated` tests dense calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from emulator import EmulationError, Kernel, Timing
from generated._runtime.kernels import TRAITS
from tests.kernels.hopper.test_hopper_backward_emulated import PORTABLE_DQ, WIDE, check_gradients, emulate_backward
from tests.kernels.hopper.test_hopper_emulated import PACKAGE, VARIANTS, Mutation, Sources, check_lse, check_output
from tests.kernels.hopper.test_hopper_emulated import emulate as emulate_forward
from tests.support.cases import Shape
from tests.support.judge import golden_of
from tests.support.segments import BY_ROW, PADDING, Call, restarting, runs, shuffled

FEW = ("causal", "window", "forgetting", "alibi", "document")
"""Two masks by distance, a decay, a score with a gradient by distance, a mask from a tensor."""

# `poisoned_memory` sets torch's deterministic mode, in which dq would have its own kernel.
ONE_KERNEL: dict[str, Any] = {"family": "hopper", "deterministic": False}

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="segmented", family="hopper", direction="backward", dtype="float16", framework="torch"),
]


DOCUMENTS, OTHERS = runs((3, 90), (1, 150), (7, 93)), runs((2, 40), (1, 200), (PADDING, 60), (2, 33))
SHORT, THREE = runs((0, 90), (4, 110)), runs((2, 50), (PADDING, 10), (6, 80), (2, 60))
# Tiles have 128 rows and keys. For head dims above 128 the forward has 64 keys, and the backward 64 of both.
CALLS = {
    "documents": Call(shape=Shape(q_len=333, kv_heads=2), tokens={"q_segment_ids": [DOCUMENTS]}),
    "restarting positions": Call(
        shape=Shape(q_len=200, batch=2, group=1),
        tokens={"q_segment_ids": [SHORT, THREE], "q_positions": [restarting(SHORT), restarting(THREE, 20)]},
    ),
    "other keys": Call(
        shape=Shape(q_len=140, kv_len=333, group=3),
        tokens={"q_segment_ids": [runs((1, 100), (PADDING, 20), (2, 20))], "kv_segment_ids": [OTHERS]},
        q_offset="end",
    ),
    "padding": Call(
        shape=Shape(q_len=300, batch=2),
        tokens={"q_segment_ids": [runs((PADDING, 140), (0, 160)), runs((PADDING, 300))]},
    ),
    "one segment of whole blocks": Call(shape=Shape(q_len=256, kv_len=768), kv_lengths=(768,), q_offset=500, reach=768),
    "fewer keys": Call(shape=Shape(q_len=130, kv_len=260, batch=3, group=1), kv_lengths=(0, 140, 260)),
    "positions in any order": Call(
        shape=Shape(q_len=140, kv_len=270, group=1),
        tokens={"q_positions": [shuffled(140, 0)], "kv_positions": [shuffled(270, 1)]},
    ),
    "five keys": Call(
        shape=Shape(q_len=130, kv_len=5, group=1),
        tokens={
            "q_segment_ids": [runs((0, 4), (5, 8), (PADDING, 118))],
            "kv_segment_ids": [runs((0, 3), (5, 2))],
            "q_positions": [restarting(runs((0, 4), (5, 8), (PADDING, 118)))],
            "kv_positions": [[2, 0, 1, 0, 1]],
        },
    ),
    "wide columns": Call(shape=Shape(q_len=200, dim=128), tokens={"q_segment_ids": [runs((4, 120), (5, 80))]}),
    "padded columns": Call(
        shape=Shape(q_len=140, dim=96, dim_v=64), tokens={"q_segment_ids": [runs((4, 100), (5, 40))]}
    ),
}
WIDE_CALL = Call(
    shape=Shape(q_len=150, dim=192, dim_v=128),
    tokens={"q_segment_ids": [runs((4, 60), (5, 90))], "q_positions": [restarting(runs((4, 60), (5, 90)))]},
)
FOR_EACH = ("restarting positions",)
ANY_ORDER = ("positions in any order", "five keys")
FOR_FEW = tuple(name for name in CALLS if name not in FOR_EACH)


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing = Timing.LATE_PRODUCTS,
    stem: str = "hopper_bwd",
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
) -> list[Kernel]:
    """The kernels that calls of `variant` launch: of the forward, and of the backward."""
    backward = emulate_backward(monkeypatch, variant, timing, mutate, stem=stem, mode="segmented")
    forward = importlib.import_module(f"{PACKAGE}.{variant}.segmented.hopper_fwd")
    return [getattr(forward, f"{variant}_segmented_hopper_fwd"), backward]


def check_forward(variant: str, call: Call) -> None:
    """Compare o and lse with float64."""
    inputs, options = call.inputs(variant), call.options()
    with torch.no_grad():
        o, lse = inputs.call(golden.load_op(variant), family="hopper", return_lse=True, **options)
    want = golden_of(variant, inputs, **options)
    check_lse(lse, want["lse"])
    check_output(o, want["o"], want["lse"])


def check(variant: str, call: Call, **options: Any) -> None:
    """Compare o, lse and every gradient with float64."""
    inputs = call.inputs(variant)
    got = golden.evaluate(golden.load_op(variant), inputs, **ONE_KERNEL, **call.options(), **options)
    want = golden_of(variant, inputs, **call.options())
    check_lse(got["lse"], want["lse"])
    check_output(got["o"], want["o"], want["lse"])
    check_gradients(got, want)


CASES = [
    *((variant, name) for variant in VARIANTS if "segmented" not in TRAITS[variant].atomic_modes for name in FOR_EACH),
    *((variant, name) for variant in FEW for name in FOR_FEW if variant not in BY_ROW or name not in ANY_ORDER),
    # The interpreter needs long for their portable dq.
    *((variant, "padded columns") for variant in VARIANTS if "segmented" in TRAITS[variant].atomic_modes),
]


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_calls(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernels = emulate(monkeypatch, variant)
    check(variant, CALLS[name])
    assert [kernel.launches for kernel in kernels] == [1, 1]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "segmented" in TRAITS[variant].atomic_modes])
def test_forward(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate_forward(monkeypatch, variant, Timing.LATE_PRODUCTS, mode="segmented")
    for name in ("documents", "restarting positions", "one segment of whole blocks"):
        check_forward(variant, CALLS[name])
    assert kernel.launches == 3


@pytest.mark.parametrize(("stem", "call"), [("hopper_bwd", CALLS["restarting positions"]), (WIDE, WIDE_CALL)])
@pytest.mark.parametrize("variant", FEW)
def test_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, stem: str, call: Call) -> None:
    kernels = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS, stem=stem)
    check(variant, call)
    assert [kernel.launches for kernel in kernels] == [1, 1]


@pytest.mark.parametrize("variant", ["causal", "forgetting"])
def test_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernels = emulate(monkeypatch, variant)
    check(variant, CALLS["restarting positions"], config=PORTABLE_DQ)
    assert [kernel.launches for kernel in kernels] == [1, 1]


@pytest.mark.parametrize("variant", ["window", "natten"])
def test_a_schedule(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """The schedule's tables are made for the blocks of this family: tables of ranges, and of lists."""
    call, op = CALLS["restarting positions"], golden.load_op(variant)
    kernels = emulate(monkeypatch, variant)
    check(variant, call, schedule=make_schedule(op, call.inputs(variant), **ONE_KERNEL, **call.options()))
    assert [kernel.launches for kernel in kernels] == [1, 1]


MUTATIONS = {
    "padding that attends": Mutation(
        old="kv_segment_ids_kv != padding_id",
        new="kv_segment_ids_kv != padding_id - 1",
        error=AssertionError,
        message="lse",
        call="padding",
    ),
    "positions of keys taken for places": Mutation(
        old="gl.convert_layout(own_key, KEY) if POSITIONS else cols",
        new="cols",
        error=AssertionError,
        message="lse",
        call="restarting positions",
    ),
    "places of keys taken for positions": Mutation(
        old="(cols < kv_len)[None, :]",
        new="(kv_idx < kv_len)[None, :]",
        error=AssertionError,
        message="lse",
        call="restarting positions",
    ),
    "a log-decay by position": Mutation(
        old="clamp_index(q_row, decay_size_2)",
        new="clamp_index(q_idx, decay_size_2)",
        error=AssertionError,
        message="lse",
        variant="forgetting",
        call="restarting positions",
    ),
    "ids as they were read": Mutation(
        old="kv_segment_ids_kv = gl.convert_layout(own_segment, KEY)",
        new="kv_segment_ids_kv = own_segment",
        error=EmulationError,
        message="an axis is added",
        call="documents",
    ),
}
BACKWARD_MUTATIONS = {
    "positions of rows taken for places": Mutation(
        old="gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift",
        new="rows + q_shift",
        error=AssertionError,
        message="d[qkv]",
        call="restarting positions",
    ),
    "ids of the rows before": Mutation(
        old="clamp_index(own_row, q_segment_ids_size_1)",
        new="clamp_index(own_row - 1, q_segment_ids_size_1)",
        error=AssertionError,
        message="d[qkv]",
        call="documents",
    ),
    "sums of keys by position": Mutation(
        old="* kv_len + cols, ddecay_cols, mask=cols < kv_len",
        new="* kv_len + kv_idx, ddecay_cols, mask=kv_idx < kv_len",
        error=AssertionError,
        message="dg",
        variant="forgetting",
        call="restarting positions",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    emulate_forward(monkeypatch, mutation.variant, Timing.LATE_PRODUCTS, mutation.of, mode="segmented")
    with pytest.raises(mutation.error, match=mutation.message):
        check_forward(mutation.variant, CALLS[mutation.call])


@pytest.mark.parametrize("name", BACKWARD_MUTATIONS)
def test_bugs_are_seen_in_the_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = BACKWARD_MUTATIONS[name]
    emulate(monkeypatch, mutation.variant, mutate=mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
