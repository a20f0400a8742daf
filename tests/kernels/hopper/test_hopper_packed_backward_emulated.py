"""The backward of packed calls of Hopper's family without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from emulator import DeadlockError, EmulationError, Kernel, Timing
from tests.kernels.hopper.test_hopper_backward_emulated import (
    FUSED,
    PORTABLE_DQ,
    WIDE,
    check_gradients,
    emulate_backward,
)
from tests.kernels.hopper.test_hopper_emulated import FEW, KINDS, VARIANTS, Mutation, Sources, calls_of
from tests.kernels.hopper.test_hopper_packed_emulated import CALLS as FORWARD_CALLS
from tests.kernels.hopper.test_hopper_packed_emulated import INF, NAN, Call, library_inputs
from tests.support.judge import reference_of
from tests.support.packings import Packing

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="packed", family="hopper", direction="backward", dtype="float16", framework="torch"),
]

NAMES = (
    *("short", "the longest in the middle", "an offset per sequence", "rows without keys"),
    *("none of some", "more sequences than keys", "padded columns"),
)
CALLS = {name: FORWARD_CALLS[name] for name in NAMES} | {
    "cut blocks": Call(packing=Packing.of(140, 340, 400), kv_heads=2),
    "whole blocks": Call(packing=Packing.of(128, 512), group=1),
    "keys that no row sees": Call(packing=Packing(q=(0, 1, 2), k=(0, 700, 1100))),
    "wide columns": Call(packing=Packing.of(130, 400), kv_heads=2, dim=128),
    "other lengths": Call(packing=Packing(q=(0, 130, 330, 331), k=(0, 40, 240, 400)), q_offset="end"),
}
FOR_EACH = ("cut blocks", "an offset per sequence", "none of some", "padded columns", "wide columns")
FOR_FEW = tuple(name for name in CALLS if name not in FOR_EACH)
WIDE_CALLS = {
    "wide tiles, cut": Call(
        packing=Packing(q=(0, 70, 70, 150), k=(0, 66, 80, 210)), dim=192, dim_v=128, q_offset="end"
    ),
    "wide tiles, an offset per sequence": Call(packing=Packing.of(100, 230), dim=256, q_offset=(-40, 30)),
    "wide values": Call(packing=Packing.of(130, 200), group=1, dim=64, dim_v=256),
}
# `poisoned_memory` sets torch's deterministic mode, in which dq would have its own kernel.
ONE_KERNEL: dict[str, Any] = {"family": "hopper", "deterministic": False}


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
    stem: str = "hopper_bwd",
) -> Kernel:
    return emulate_backward(monkeypatch, variant, timing, mutate, stem=stem, mode="packed")


def check(variant: str, call: Call, **options: Any) -> None:
    """Compare every gradient with float64."""
    inputs = call.inputs(variant)
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    reference = reference_of(variant, packed=True)
    got = golden.evaluate(golden.load_op(variant), inputs, **ONE_KERNEL, **call.options(), **options)
    check_gradients(got, golden.evaluate(reference, inputs.double(), **call.options()))


@pytest.mark.parametrize(("variant", "name"), [*calls_of(FOR_EACH), *calls_of(FOR_FEW, FEW)])
def test_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    check(variant, CALLS["other lengths"])
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", [variant for variant in FEW if variant in FUSED])
def test_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS["cut blocks"], config=PORTABLE_DQ)
    assert kernel.launches == 1


@pytest.mark.parametrize(("variant", "name"), [*calls_of(list(WIDE_CALLS)[:1]), *calls_of(list(WIDE_CALLS)[1:], FEW)])
def test_wide_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, stem=WIDE)
    check(variant, WIDE_CALLS[name])
    assert kernel.launches == 1


def test_wide_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, stem=WIDE)
    check("causal", WIDE_CALLS["wide tiles, cut"], config=PORTABLE_DQ)
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_schedule(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """The schedule's table of keys is made for the blocks of this family."""
    call, op = CALLS["cut blocks"], golden.load_op(variant)
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    inputs = call.inputs(variant)
    check(variant, call, schedule=make_schedule(op, inputs, **ONE_KERNEL, **call.options()))
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_sequence_sees_another(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """The results do not depend on the values before and after a sequence."""
    call, op = Call(packing=Packing.of(70, 333, 400)), golden.load_op(variant)
    emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    inputs, found = call.inputs(variant), []
    for is_filled in (False, True):
        q, k, v, do = (x.detach().clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        if is_filled:
            for x in (q, k, v, do):
                x[:70], x[333:] = NAN, INF
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = replace(inputs, q=q, k=k, v=v).call(op, **ONE_KERNEL, **call.options())
        found.append(torch.autograd.grad(o, leaves, do))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got[70:333], want[70:333], rtol=0, atol=1e-3)


@pytest.mark.parametrize("variant", KINDS)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str) -> None:
    """Against the op's own reference in float32."""
    packing = Packing(q=(0, 130, 130, 200), k=(0, 140, 150, 333))
    inputs = library_inputs(library, variant, packing)
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library, mode="packed")
    op, options = golden.load_op(variant, library), {"q_offset": "end", **packing.options()}
    drawn = golden.load_manifest(library)[variant]["tensors"]
    trained = [name for name in inputs.tensors if name in ("g", "sink") or drawn[name]["grad"]]
    found = []
    for is_reference in (False, True):
        if is_reference:
            monkeypatch.setattr(f"{library}.{variant}.torch_op.runs_reference", lambda _: True)
        qkv = [x.float() if is_reference else x.clone() for x in (inputs.q, inputs.k, inputs.v)]
        own = {name: inputs.tensors[name].clone() for name in trained}
        leaves = [x.requires_grad_() for x in (*qkv, *own.values())]
        call = replace(inputs, q=qkv[0], k=qkv[1], v=qkv[2], tensors={**inputs.tensors, **own})
        o = call.call(op, **options, **({} if is_reference else ONE_KERNEL))
        gradients = torch.autograd.grad(o, leaves, inputs.do.to(o.dtype), allow_unused=is_reference)
        pairs = zip(leaves, gradients, strict=True)
        found.append([torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs])
    assert kernel.launches == 1
    names = ["dq", "dk", "dv", *(f"d{name}" for name in trained)]
    check_gradients(*(dict(zip(names, gradients, strict=True)) for gradients in found))


MUTATIONS = {
    "rows counted from the start of a sequence": Mutation(
        old="MOST_ROWS - self.length + row, column",
        new="row, column",
        error=EmulationError,
        message="TMA copies byte -",
        call="cut blocks",
    ),
    "blocks of rows of two sequences": Mutation(
        old="row_first = q_start // BLOCK_M + b",
        new="row_first = q_start // BLOCK_M",
        error=AssertionError,
        message="d[qkv]",
        call="cut blocks",
    ),
    "work not published": Mutation(
        old="        mbarrier.arrive(self.full.index(stage), count=1)\n        return item",
        new="        return item",
        error=DeadlockError,
        message=r"consume:\d+ > receive",
        call="cut blocks",
    ),
    "work not waited for": Mutation(
        old="        mbarrier.wait(self.full.index(stage), (turn // 2) & 1)\n",
        new="",
        error=EmulationError,
        message="read before anything|read without a wait|more than",
        call="cut blocks",
    ),
    "work never released": Mutation(
        old="        mbarrier.arrive(self.empty.index(stage), count=1)\n        return fields",
        new="        return fields",
        error=DeadlockError,
        message=r"produce:\d+ > fetch",
        call="cut blocks",
    ),
    "work overwritten": Mutation(
        old="        mbarrier.wait(self.empty.index(stage), ((turn // 2) & 1) ^ 1)\n",
        new="",
        error=EmulationError,
        message="overwritten without a wait|more than 3 arrivals",
        call="keys that no row sees",
    ),
    "keys beyond the last of a sequence": Mutation(
        old="mask=(row < length)[:, None]",
        new="mask=(row < length + 128)[:, None]",
        error=EmulationError,
        message="is accessed",
        call="other lengths",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    emulate(monkeypatch, mutation.variant, Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
