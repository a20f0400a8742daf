"""The backward of Hopper's family without a GPU; `test_hopper_emulated` tests the forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from emulator import DeadlockError, EmulationError, Kernel, Timing
from tests.kernels.hopper.test_hopper_emulated import (
    FEW,
    KINDS,
    PACKAGE,
    VARIANTS,
    Call,
    Mutation,
    Sources,
    calls_of,
    emulate,
    emulated_kernel,
    kernels,
)
from tests.support.cases import Shape
from tests.support.library_formulas import FORMULAS

FUSED = {variant for variant, traits in kernels.TRAITS.items() if "dense" in traits.fused_modes}
WIDE = "hopper_bwd_wide"
PORTABLE_DQ = {"dq": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}}
"""A tile for dq: with it, dq has its own kernel."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="backward", dtype="float16", framework="torch"),
]

# Tiles have 128 keys, and 128 queries at 64 columns or 64 at 128. Above that another kernel has 64 of both.
CALLS = {
    "cut blocks": Call(shape=Shape(q_len=200, kv_len=333)),
    "one query": Call(shape=Shape(q_len=1, kv_len=333, batch=2), q_offset="end"),
    "rows without keys": Call(shape=Shape(q_len=300, kv_len=256), q_offset=-150),
    "an offset per row": Call(shape=Shape(q_len=150, kv_len=260, batch=2, group=1), q_offset=(-70, 90)),
    "six blocks of keys": Call(shape=Shape(q_len=256, kv_len=768), q_offset=500, positions=768),
    "whole blocks": Call(shape=Shape(q_len=256, kv_len=256, group=3), transposed=True),
    "a far window": Call(shape=Shape(q_len=200, kv_len=400, group=1), q_offset=4096 - 50, positions=4300),
    "wide columns": Call(shape=Shape(q_len=256, kv_len=256, kv_heads=2, dim=128)),
    "padded columns": Call(shape=Shape(q_len=140, kv_len=270, dim=96, dim_v=64)),
    "few columns of a second part": Call(shape=Shape(q_len=140, kv_len=270, dim=72, dim_v=88)),
    "narrow columns in parts": Call(shape=Shape(q_len=140, kv_len=270, dim=40, dim_v=48)),
}

WIDE_CALLS = {
    "wide tiles, cut": Call(shape=Shape(q_len=150, kv_len=140, dim=192, dim_v=128), q_offset="end"),
    "wide tiles, an offset per row": Call(shape=Shape(q_len=100, kv_len=130, batch=2, dim=256), q_offset=(-70, 30)),
    "wide tiles, padding left out": Call(shape=Shape(q_len=100, kv_len=130, dim=168, dim_v=144)),
    "wide values, few columns of a second part": Call(shape=Shape(q_len=100, kv_len=130, dim=80, dim_v=160)),
    "wide values": Call(shape=Shape(q_len=100, kv_len=192, group=1, dim=64, dim_v=256), q_offset=60),
}
WIDE_ROWS = Call(shape=Shape(q_len=80, kv_len=140, dim=192, dim_v=128), q_offset="end")


def emulate_backward(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
    package: str = PACKAGE,
    stem: str = "hopper_bwd",
    mode: str = "",
) -> Kernel:
    """Calls of `variant` launch the returned kernel in their backward; its name ends in `stem`."""
    emulate(monkeypatch, variant, timing, package=package, mode=mode)
    folder = f"{package}.{variant}.{mode}".rstrip(".")
    module = importlib.import_module(f"{folder}.hopper_bwd")
    assert module.__file__ is not None
    name = f"{variant}_{mode}".rstrip("_") + f"_{stem}"
    kernel = emulated_kernel(Path(module.__file__), name, timing, mutate)
    monkeypatch.setattr(module, name, kernel)
    # The portable dq runs in the interpreter, which has no inline instructions.
    for choice in ("is_nvidia", "has_tanh_instruction"):
        monkeypatch.setattr(f"{package}._runtime.torch.backend.{choice}", lambda _: False)
    return kernel


def check(variant: str, call: Call, package: str = PACKAGE, *, positive: bool = False, **options: Any) -> None:
    """Compare every gradient with float64; `positive`: q and k have no element below zero."""
    inputs = call.inputs(variant, package)
    if positive:
        inputs = replace(inputs, q=inputs.q.abs(), k=inputs.k.abs())
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    op, reference = golden.load_op(variant, package), golden.load_reference(variant, package=package)
    # `poisoned_memory` sets torch's deterministic mode, in which dq would have its own kernel.
    got = golden.evaluate(op, inputs, family="hopper", deterministic=False, **call.options(), **options)
    want = golden.evaluate(reference, inputs.double(), **call.options())
    check_gradients(got, want, sums={"dsink": sink_terms(inputs, want)} if "sink" in inputs.tensors else {})


def sink_terms(inputs: Inputs, want: Mapping[str, Tensor]) -> float:
    """The largest sum of absolute terms of a sink's gradient. Rows cancel, so the gradient may be far smaller than its
    change by the rounding of o to 16 bits."""
    weights = (inputs.tensors["sink"].double()[:, None] - want["lse"]).exp()
    return (weights * (want["o"] * inputs.do.double()).sum(-1)).abs().sum((0, 2)).max().item()


def check_gradients(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], *, sums: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Compare gradients relative to their largest element, or to the sums in `sums`, if rounding scales with these."""
    for name, gradient in got.items():
        if name in ("o", "lse"):
            continue
        assert not gradient.isnan().any(), f"{name}: {int(gradient.isnan().sum())} of {gradient.numel()} are NaN"
        largest = max(want[name].abs().max().item(), sums.get(name, 0.0))
        error = (gradient.double() - want[name]).abs().max().item()
        assert error <= golden.BOUND[torch.float16] * max(largest, 1e-3), (
            f"{name}: largest error {error:.1e} of {largest:.1e}"
        )


@pytest.mark.parametrize(("variant", "name"), calls_of(CALLS))
def test_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize(("variant", "name"), calls_of(WIDE_CALLS))
def test_wide_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, stem=WIDE)
    check(variant, WIDE_CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize(("stem", "call"), [("hopper_bwd", CALLS["an offset per row"]), (WIDE, WIDE_ROWS)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, stem: str, call: Call) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.EARLY_PRODUCTS, stem=stem)
    check(variant, call)
    assert kernel.launches == 1


GROUPS = [
    ("hopper_bwd", Call(shape=Shape(q_len=140, kv_len=270, kv_heads=2, group=4, dim=72, dim_v=88))),
    (WIDE, Call(shape=Shape(q_len=80, kv_len=140, batch=2, group=4, dim=192, dim_v=128))),
]


@pytest.mark.parametrize(("stem", "call"), GROUPS)
@pytest.mark.parametrize("variant", FEW)
def test_groups_of_query_heads(monkeypatch: pytest.MonkeyPatch, variant: str, stem: str, call: Call) -> None:
    """Each group has dk and dv of its own, which another kernel adds up: here two groups of two heads each."""
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, stem=stem)
    monkeypatch.setattr(f"{PACKAGE}._runtime.core.head_groups.choose_number", lambda *_: 2)
    check(variant, call)
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", [variant for variant in FEW if variant in FUSED])
def test_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS["cut blocks"], config=PORTABLE_DQ)
    assert kernel.launches == 1


def test_wide_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulate_backward(monkeypatch, "causal", Timing.LATE_PRODUCTS, stem=WIDE)
    check("causal", WIDE_CALLS["wide tiles, cut"], config=PORTABLE_DQ)
    assert kernel.launches == 1


ROWS = Call(shape=Shape(q_len=150, kv_len=300), q_offset="end")
LIBRARY_CALLS = [
    *((variant, "hopper_bwd", ROWS) for variant in FORMULAS),
    *((variant, WIDE, WIDE_ROWS) for variant in KINDS),
]


@pytest.mark.parametrize(("variant", "stem", "call"), LIBRARY_CALLS)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str, stem: str, call: Call) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library, stem=stem)
    check(variant, call, library, positive=FORMULAS[variant].positive)
    assert kernel.launches == 1


MUTATIONS = {
    "no fence": Mutation(
        old="        fence_async_shared()\n        mbarrier.arrive(ds_ring.full.index(next_stage), count=1)\n",
        new="        mbarrier.arrive(ds_ring.full.index(next_stage), count=1)\n",
        error=EmulationError,
        message="read without a fence",
    ),
    "no fence behind what went through the memory of v": Mutation(
        old="            fence_async_shared()\n            mbarrier.arrive(v_ring.empty.index(PART), count=1)\n",
        new="            mbarrier.arrive(v_ring.empty.index(PART), count=1)\n",
        error=EmulationError,
        message="copied to without a fence",
    ),
    "no wait for the other half of ds": Mutation(
        old="    mbarrier.wait(ds_ring.full.index(turn & 1), (turn >> 1) & 1)\n",
        new="",
        error=EmulationError,
        message="read without a wait|more than 2 arrivals",
    ),
    "one tile for ds": Mutation(
        old="        mbarrier.wait(ds_ring.empty.index(next_stage), (lap & 1) ^ 1)\n",
        new="",
        error=EmulationError,
        message="is overwritten",
    ),
    "dq handed over before it is stored": Mutation(
        old="mbarrier.wait(dq_ring.full.index(part), turn & 1)",
        new="pass",
        error=EmulationError,
        message="is read|is overwritten",
    ),
    "no wait for the additions": Mutation(
        old="tma.store_wait(", new="id(", error=EmulationError, message="is overwritten|before its additions did"
    ),
    "q released while it is read": Mutation(
        old="dk = wait_for_sums(dk, 0)\n        q_ring.release(stage)",
        new="q_ring.release(stage)\n        dk = wait_for_sums(dk, 0)",
        error=EmulationError,
        message="is overwritten",
    ),
    "no fence behind the ones": Mutation(
        variant="forgetting",
        old="    fence_async_shared()\n    return tiles.index(0)\n",
        new="    return tiles.index(0)\n",
        error=EmulationError,
        message="read without a fence",
    ),
    "sums of keys used while they are added": Mutation(
        variant="forgetting",
        old="done = warpgroup_mma_wait(0, deps=dk + (column_sums,))",
        new="done = warpgroup_mma_wait(1, deps=dk + (column_sums,))",
        error=EmulationError,
        message="still run",
    ),
    "no mask": Mutation(
        old="qk = gl.where(keep, qk, ", new="qk = gl.where(True, qk, ", error=AssertionError, message="largest error"
    ),
}

SUMS_DONE = """\
        done = wait_for_sums((dv,) + beside, 0)
        dv = done[0]
        if ROW_SUMS:
            row_sums = done[len(beside)]
"""
P_READ = "        do_ring.release(turn % do_ring.stages)\n        p_ring.release(turn)\n"
WIDE_MUTATIONS = {
    "no fence": Mutation(
        old="        fence_async_shared()\n", new="        pass\n", error=EmulationError, message="read without a fence"
    ),
    "no wait for the reader": Mutation(
        old="        mbarrier.wait(self.empty.index(stage), lap ^ 1)\n",
        new="",
        error=EmulationError,
        message="is overwritten",
    ),
    "no wait for what is handed over": Mutation(
        old="        mbarrier.wait(self.full.index(turn & 1), (turn >> 1) & 1)\n",
        new="",
        error=EmulationError,
        message="read without a wait|read before anything|without a fence|more than 1 arrivals",
    ),
    "dq added before it is there": Mutation(
        old="dq = warpgroup_mma_wait(0, deps=(next_dq,))",
        new="dq = warpgroup_mma_wait(1, deps=(next_dq,))",
        error=EmulationError,
        message="still run",
    ),
    "p released while it is read": Mutation(
        old=SUMS_DONE + P_READ, new=P_READ + SUMS_DONE, error=EmulationError, message="is overwritten"
    ),
    "q never released by one": Mutation(
        old="q_ring.release(stage, 2)", new="q_ring.release(stage)", error=DeadlockError, message="no partition"
    ),
    "an addition elsewhere": Mutation(
        old="(part - 1) * (BLOCK_M * 64)",
        new="part * (BLOCK_M * 64)",
        error=AssertionError,
        message="dq: largest error",
    ),
}


@pytest.mark.parametrize("name", WIDE_MUTATIONS)
def test_bugs_are_seen_in_wide_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = WIDE_MUTATIONS[name]
    emulate_backward(monkeypatch, mutation.variant, Timing.LATE_PRODUCTS, mutation.of, stem=WIDE)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, Call(shape=Shape(q_len=256, kv_len=128, dim=192, dim_v=128), q_offset=128))


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    emulate_backward(monkeypatch, mutation.variant, Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
