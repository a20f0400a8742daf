"""Segmented calls whose segments are runs of tokens: Hopper's packed forward computes them, without a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen.testing import golden
from codegen.testing.golden import Inputs
from emulator import Kernel, Timing
from generated._runtime.core import head_groups, segment_runs
from tests.kernels.hopper.test_hopper_backward_emulated import WIDE, check_gradients, emulate_backward
from tests.kernels.hopper.test_hopper_emulated import Sources, check_lse, check_output, emulate
from tests.support.cases import Shape
from tests.support.judge import golden_of
from tests.support.segments import PADDING, Call, by_token, runs

VARIANTS = ("causal", "full", "window", "alibi", "gpt_oss")
"""In order: no score, no mask, a distance in the mask, a score with a vector of row terms, a sink."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="segmented", family="hopper", direction="forward", dtype="float16", framework="torch"),
]

DOCUMENTS, OTHERS = runs((3, 90), (5, 150), (7, 93)), runs((PADDING, 20), (1, 13), (4, 100), (PADDING, 7), (9, 193))
IN_ORDER = {
    "documents": Call(shape=Shape(q_len=333, kv_heads=2, group=2), tokens={"q_segment_ids": [DOCUMENTS]}),
    "padding between segments": Call(
        shape=Shape(q_len=333, batch=2, group=2), tokens={"q_segment_ids": [OTHERS, DOCUMENTS]}, q_offset=40
    ),
    "one segment": Call(shape=Shape(q_len=200, batch=2), tokens={"q_segment_ids": [[4] * 200, [PADDING] * 200]}),
}
OUT_OF_ORDER = {
    "a segment of two runs": runs((3, 90), (5, 150), (3, 93)),
    "one run behind padding": runs((3, 90), (PADDING, 150), (3, 93)),
    "falling ids": runs((7, 90), (5, 243)),
    "more runs than there is room for": [i // 20 for i in range(333)],
}


def launched(monkeypatch: pytest.MonkeyPatch, variant: str, wrong: str) -> list[Kernel]:
    """The kernels of the forwards of packed and of segmented calls; the `wrong` one adds 1 to lse."""
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)

    def mutate(sources: Sources) -> Sources:
        assert ")) * LN2" in sources["kernel"]
        return {**sources, "kernel": sources["kernel"].replace(")) * LN2", ")) * LN2 + 1")}

    def kernel(mode: str) -> Kernel:
        change = mutate if mode == wrong else lambda sources: sources
        return emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, change, mode=mode)

    return [kernel("packed"), kernel("segmented")]


def check(variant: str, inputs: Inputs, options: dict[str, Any]) -> None:
    with torch.no_grad():
        o, lse = inputs.call(golden.load_op(variant), family="hopper", return_lse=True, **options)
    want = golden_of(variant, inputs, **options)
    check_lse(lse, want["lse"])
    check_output(o, want["o"], want["lse"])


def check_gradients_of(variant: str, inputs: Inputs, options: dict[str, Any], *, deterministic: bool = False) -> None:
    got = golden.evaluate(golden.load_op(variant), inputs, family="hopper", deterministic=deterministic, **options)
    want = golden_of(variant, inputs, **options)
    check_lse(got["lse"], want["lse"])
    check_output(got["o"], want["o"], want["lse"])
    check_gradients(got, want)


def differentiated(monkeypatch: pytest.MonkeyPatch, variant: str, wrong: str, stem: str = "hopper_bwd") -> list[Kernel]:
    """The kernels of the backwards of packed and of segmented calls; the `wrong` one doubles dk."""
    launched(monkeypatch, variant, wrong="none")

    def mutate(sources: Sources) -> Sources:
        text = sources["kernel"]
        assert "dk * scale" in text
        return {**sources, "kernel": text.replace("dk * scale", "dk * scale * 2")}

    def kernel(mode: str) -> Kernel:
        change = mutate if mode == wrong else lambda sources: sources
        return emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, change, stem=stem, mode=mode)

    return [kernel("packed"), kernel("segmented")]


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_packed_forward_computes_runs(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    packed, segmented = launched(monkeypatch, variant, wrong="segmented")
    call = IN_ORDER[name]
    inputs = call.inputs(variant)
    for each in (inputs, by_token(inputs)):
        check(variant, each, call.options())
    assert (packed.launches, segmented.launches) == (2, 2)


@pytest.mark.parametrize("name", OUT_OF_ORDER)
@pytest.mark.parametrize("variant", ["causal", "gpt_oss"])
def test_the_segmented_forward_computes_the_rest(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    packed, segmented = launched(monkeypatch, variant, wrong="packed")
    call = Call(shape=Shape(q_len=333, batch=2), tokens={"q_segment_ids": [DOCUMENTS, OUT_OF_ORDER[name]]})
    check(variant, call.inputs(variant), call.options())
    assert (packed.launches, segmented.launches) == (1, 1)


DIFFERENTIATED = ("causal", "full", "window", "softcap")
"""In order: no score, no mask, a distance in the mask, a score."""

FEW_RUNS = runs((3, 200), (5, 160), (PADDING, 70), (9, 170))
FEW_OTHERS = runs((2, 350), (4, 250))
BACKWARDS = {
    "runs": Call(shape=Shape(q_len=600, batch=2, group=2, dim=128), tokens={"q_segment_ids": [FEW_RUNS, FEW_OTHERS]}),
    "padding alone": Call(shape=Shape(q_len=140, batch=2, dim=128), tokens={"q_segment_ids": [[PADDING] * 140] * 2}),
}
NO_RUNS = {
    "a segment of two runs": [3] * 200 + [5] * 200 + [3] * 200,
    "more runs than there is room for": runs(*((i, 100) for i in range(6))),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("variant", DIFFERENTIATED)
def test_the_packed_backward_computes_runs(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    packed, segmented = differentiated(monkeypatch, variant, wrong="segmented")
    inputs = BACKWARDS[name].inputs(variant)
    for each in (inputs, by_token(inputs)):
        check_gradients_of(variant, each, BACKWARDS[name].options())
    assert (packed.launches, segmented.launches) == (2, 2)


GROUPED = Call(
    shape=Shape(q_len=300, batch=2, group=4, dim=72, dim_v=56),
    tokens={"q_segment_ids": [FEW_OTHERS[-300:], runs((3, 100), (5, 150), (PADDING, 50))]},
)
STORED = {
    "by tokens": (by_token, Shape(q_len=300, batch=2, kv_heads=2, group=4, dim=72, dim_v=56)),
    "by heads, of which there is one": (lambda inputs: inputs, GROUPED.shape),
}


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("variant", ["causal", "softcap"])
def test_the_packed_backward_computes_runs_by_groups_of_heads(
    monkeypatch: pytest.MonkeyPatch, variant: str, stored: str, number: int
) -> None:
    packed, segmented = differentiated(monkeypatch, variant, wrong="segmented")
    monkeypatch.setattr(head_groups, "choose_number", lambda *_: number)
    change, shape = STORED[stored]
    check_gradients_of(variant, change(replace(GROUPED, shape=shape).inputs(variant)), GROUPED.options())
    assert (packed.launches, segmented.launches) == (1, 1)


def test_heads_of_batch_rows_that_are_stored_by_heads_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, segmented = differentiated(monkeypatch, "causal", wrong="segmented")

    def fail_to_choose(*_: int) -> int:
        pytest.fail("the query heads of a key head are split")

    monkeypatch.setattr(head_groups, "choose_number", fail_to_choose)
    call = replace(GROUPED, shape=STORED["by tokens"][1])
    check_gradients_of("causal", call.inputs("causal"), call.options())
    assert (packed.launches, segmented.launches) == (1, 1)


def test_the_segmented_backward_computes_the_rest_by_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, segmented = differentiated(monkeypatch, "causal", wrong="packed")
    monkeypatch.setattr(head_groups, "choose_number", lambda *_: 2)
    call = replace(GROUPED, tokens={"q_segment_ids": [FEW_OTHERS[-300:], [3] * 90 + [5] * 150 + [3] * 60]})
    check_gradients_of("causal", call.inputs("causal"), call.options())
    assert (packed.launches, segmented.launches) == (1, 1)


@pytest.mark.parametrize("name", NO_RUNS)
def test_the_segmented_backward_computes_the_rest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    packed, segmented = differentiated(monkeypatch, "causal", wrong="packed")
    call = Call(shape=Shape(q_len=600, batch=2, dim=128), tokens={"q_segment_ids": [FEW_OTHERS, NO_RUNS[name]]})
    check_gradients_of("causal", call.inputs("causal"), call.options())
    assert (packed.launches, segmented.launches) == (1, 1)


def test_wide_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, segmented = differentiated(monkeypatch, "causal", wrong="segmented", stem=WIDE)
    call = Call(shape=Shape(q_len=300, dim=192, dim_v=128), tokens={"q_segment_ids": [runs((4, 170), (5, 130))]})
    check_gradients_of("causal", call.inputs("causal"), call.options())
    assert (packed.launches, segmented.launches) == (1, 1)


@pytest.mark.parametrize("variant", ["causal", "softcap"])
def test_the_packed_kernels_compute_dq_apart(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    packed, segmented = differentiated(monkeypatch, variant, wrong="segmented")
    for call in BACKWARDS.values():
        check_gradients_of(variant, by_token(call.inputs(variant)), call.options(), deterministic=True)
    assert (packed.launches, segmented.launches) == (2, 2)


@pytest.mark.parametrize("tokens", [FEW_RUNS, NO_RUNS["a segment of two runs"]])
def test_one_of_both_dq_is_computed(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    differentiated(monkeypatch, "causal", wrong="none")
    launch = importlib.import_module("generated.causal.segmented.launch")
    given: list[str] = []

    def fill(*arguments: Any) -> None:
        given.append("packed")
        arguments[10].fill_(7.0)

    monkeypatch.setattr(launch, "query_gradients_of_runs", fill)
    call = Call(shape=Shape(q_len=600, dim=128), tokens={"q_segment_ids": [tokens]})
    got = golden.evaluate(
        golden.load_op("causal"), call.inputs("causal"), family="hopper", deterministic=True, **call.options()
    )
    assert given == ["packed"]
    assert bool((got["dq"] == 7.0).all()) == (tokens is FEW_RUNS)
