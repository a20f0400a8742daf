"""The backward of Hopper's family without a GPU, as `test_hopper_emulated` has the forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import golden
from tests.gluon import EmulationError, Kernel, Timing

from .cases import Shape
from .library_formulas import FORMULAS
from .test_hopper_emulated import PACKAGE, VARIANTS, Call, Mutation, emulate, library

FUSED = importlib.import_module(f"{PACKAGE}._runtime.kernels").FUSED_BACKWARDS
PORTABLE_DQ = {"dq": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}}
"""With a tile of its own dq has a kernel of its own."""

__all__ = ["library"]  # a fixture

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Tiles have 128 keys, and 128 queries at 64 columns, 64 at 128.
CALLS = {
    "cut blocks": Call(shape=Shape(q_len=200, kv_len=333)),
    "one query": Call(shape=Shape(q_len=1, kv_len=333, batch=2), q_offset="end"),
    "rows without keys": Call(shape=Shape(q_len=300, kv_len=256), q_offset=-150),
    "an offset per row": Call(shape=Shape(q_len=150, kv_len=260, batch=2, group=1), q_offset=(-70, 90)),
    "six blocks of keys": Call(shape=Shape(q_len=256, kv_len=768, group=3), q_offset=500, positions=768),
    "cut rows": Call(shape=Shape(q_len=200, kv_len=300), q_offset="end"),
    "whole blocks": Call(shape=Shape(q_len=384, kv_len=384, group=2), transposed=True),
    "a far window": Call(shape=Shape(q_len=200, kv_len=400, group=1), q_offset=4096 - 50, positions=4300),
    "wide columns": Call(shape=Shape(q_len=256, kv_len=256, kv_heads=2, dim=128)),
    "padded columns": Call(shape=Shape(q_len=140, kv_len=270, dim=96, dim_v=64)),
}


EARLY = ("an offset per row", Timing.EARLY_PRODUCTS)


def emulate_backward(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[str], str] = lambda source: source,
    package: str = PACKAGE,
    mode: str = "",
) -> Kernel:
    """Calls of `variant` launch the kernel returned in their backward."""
    emulate(monkeypatch, variant, timing, package=package, mode=mode)
    folder = f"{package}.{variant}.{mode}".rstrip(".")
    module = importlib.import_module(f"{folder}.hopper_bwd")
    assert module.__file__ is not None
    name = f"{variant}_{mode}".rstrip("_") + "_hopper_bwd"
    kernel = Kernel(mutate(Path(module.__file__).read_text(encoding="utf-8")), name, timing)
    monkeypatch.setattr(module, name, kernel)
    # The portable dq runs in the interpreter, which has no instructions.
    for choice in ("is_nvidia", "has_tanh_instruction"):
        monkeypatch.setattr(f"{folder}.torch_launch.{choice}", lambda _: False, raising=False)
    return kernel


def check(variant: str, call: Call, package: str = PACKAGE, *, positive: bool = False, **options: Any) -> None:
    """Compare every gradient with float64; `positive`: q and k have no element below zero."""
    inputs = call.inputs(variant, package)
    if positive:
        inputs = replace(inputs, q=inputs.q.abs(), k=inputs.k.abs())
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    op, reference = golden.load_op(variant, package), golden.load_reference(variant, package=package)
    got = golden.evaluate(op, inputs, family="hopper", **call.options(), **options)
    check_gradients(got, golden.evaluate(reference, inputs.double(), **call.options()))


def check_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, gradient in got.items():
        if name in ("o", "lse"):
            continue
        assert not gradient.isnan().any(), f"{name}: {int(gradient.isnan().sum())} of {gradient.numel()} are NaN"
        largest = want[name].abs().max().item()
        error = (gradient.double() - want[name]).abs().max().item()
        assert error <= golden.BOUND[torch.float16] * max(largest, 1e-3), (
            f"{name}: largest error {error:.1e} of {largest:.1e}"
        )


@pytest.mark.parametrize(("name", "timing"), [*((name, Timing.LATE_PRODUCTS) for name in CALLS), EARLY])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str, timing: Timing) -> None:
    kernel = emulate_backward(monkeypatch, variant, timing)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", sorted(FUSED))
def test_behind_the_portable_dq(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS["cut blocks"], config=PORTABLE_DQ)
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", FORMULAS)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library)
    check(variant, CALLS["cut rows"], library, positive=FORMULAS[variant].positive)
    assert kernel.launches == 1


MUTATIONS = {
    "no fence": Mutation(
        old="        fence_async_shared()\n", new="", error=EmulationError, message="read without a fence"
    ),
    "no wait for the other half of ds": Mutation(
        old="        mbarrier.wait(ds_full, ring_turn & 1)\n",
        new="",
        error=EmulationError,
        message="read without a wait|more than 2 arrivals",
    ),
    "one tile for ds": Mutation(
        old="ds_tiles.index(ring_turn & 1)", new="ds_tiles.index(0)", error=EmulationError, message="is overwritten"
    ),
    "dq handed over before it is stored": Mutation(
        old="mbarrier.wait(dq_full.index(part), q_turn & 1)",
        new="pass",
        error=EmulationError,
        message="is read|is overwritten",
    ),
    "no wait for the additions": Mutation(
        old="tma.store_wait(", new="id(", error=EmulationError, message="is overwritten|before its additions did"
    ),
    "q released while it is read": Mutation(
        old="    dk = warpgroup_mma_wait(0, deps=(dk,))\n    mbarrier.arrive(q_ring[3].index(stage), count=1)",
        new="    mbarrier.arrive(q_ring[3].index(stage), count=1)\n    dk = warpgroup_mma_wait(0, deps=(dk,))",
        error=EmulationError,
        message="is overwritten",
    ),
    "no mask": Mutation(
        old="qk = gl.where(keep, qk, ", new="qk = gl.where(True, qk, ", error=AssertionError, message="largest error"
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    emulate_backward(monkeypatch, mutation.variant, Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
