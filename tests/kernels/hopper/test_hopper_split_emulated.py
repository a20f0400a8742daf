"""Hopper's backward for more than 256 columns without a GPU: a launch for each of dq, dk and dv."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.testing import golden
from emulator import DeadlockError, EmulationError, Kernel, Timing
from tests.kernels.hopper import test_hopper_packed_emulated as packed
from tests.kernels.hopper.test_hopper_backward_emulated import check, check_gradients
from tests.kernels.hopper.test_hopper_emulated import (
    EXPECT,
    KINDS,
    PACKAGE,
    PROGRAMS,
    VARIANTS,
    WAIT_FOR_STAGE,
    Call,
    Mutation,
    Sources,
    emulate,
    emulated_kernel,
    kernels,
    with_timings,
)
from tests.kernels.hopper.test_hopper_emulated import check as check_forward
from tests.kernels.hopper.test_hopper_wide_emulated import SEGMENTED
from tests.support.cases import Shape
from tests.support.judge import golden_of, reference_of
from tests.support.library_formulas import FORMULAS
from tests.support.packings import Packing

SPLIT = [variant for variant in VARIANTS if kernels.TRAITS[variant].splits_gradients]
FEW = ("causal", "document", "full", "gpt_oss")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="backward", dtype="float16", framework="torch"),
]

# Tiles have 64 keys by 32 rows, and for dq 64 rows by 32 keys.
CALLS = {
    "cut blocks": Call(shape=Shape(q_len=70, kv_len=100, dim=512)),
    "rows without keys": Call(shape=Shape(q_len=150, kv_len=120, dim=264), q_offset=-70),
    "an offset per row": Call(shape=Shape(q_len=70, kv_len=130, batch=2, group=1, dim=264), q_offset=(-40, 60)),
    "many blocks": Call(shape=Shape(q_len=320, kv_len=320, group=1, dim=264), transposed=True),
    "few columns of the second half": Call(shape=Shape(q_len=70, kv_len=100, dim=320, dim_v=400), q_offset="end"),
    "narrow values": Call(shape=Shape(q_len=70, kv_len=100, dim=512, dim_v=72)),
    "narrow keys": Call(shape=Shape(q_len=70, kv_len=100, dim=72, dim_v=512)),
}
FOR_EACH = "cut blocks"


def emulate_split(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
    mode: str = "",
    programs: int = PROGRAMS,
    package: str = PACKAGE,
) -> list[Kernel]:
    """Calls of `variant` launch the returned kernels in their backward: of dk and dv, and of dq."""
    emulate(monkeypatch, variant, timing, package=package, mode=mode, programs=programs, stem="hopper_fwd_wide")
    module = importlib.import_module(f"{package}.{variant}.{mode}".rstrip(".") + ".hopper_split")
    assert module.__file__ is not None
    found = []
    for stem in ("keys", "rows"):
        name = f"{variant}_{mode}".rstrip("_") + f"_hopper_split_{stem}"
        found.append(emulated_kernel(Path(module.__file__), name, timing, mutate))
        monkeypatch.setattr(module, name, found[-1])
    return found


def launches(found: list[Kernel]) -> list[int]:
    return [kernel.launches for kernel in found]


@pytest.mark.parametrize(
    ("variant", "name"),
    [*((each, FOR_EACH) for each in SPLIT), *((each, name) for each in FEW for name in CALLS if name != FOR_EACH)],
)
def test_backward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    found = emulate_split(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS[name])
    assert launches(found) == [2, 1]


@pytest.mark.parametrize("name", ["an offset per row", "many blocks"])
@pytest.mark.parametrize("variant", FEW)
def test_backward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    found = emulate_split(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    check(variant, CALLS[name])
    assert launches(found) == [2, 1]


def test_a_fixed_order_needs_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that computes dq alone adds it up in a fixed order."""
    found = emulate_split(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    inputs = CALLS[FOR_EACH].inputs("causal", PACKAGE)
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    op = golden.load_op("causal")
    first, second = (golden.evaluate(op, inputs, family="hopper", deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("dq", "dk", "dv"))
    assert launches(found) == [4, 2]


# The other formulas differ from these in expressions alone, which `test_hopper_backward_emulated` tests.
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in KINDS else pytest.mark.full) for name in FORMULAS]
)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str) -> None:
    """Masks of all kinds, with rows that see nothing, and full blocks far from the diagonal."""
    call = Call(shape=Shape(q_len=100, kv_len=200, batch=2, group=1, dim=264), q_offset=(-40, 130))
    splits = importlib.import_module(f"{library}._runtime.kernels").TRAITS[variant].splits_gradients
    if not splits:
        kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library, stem="hopper_fwd_wide")
        check_forward(variant, call, library, positive=FORMULAS[variant].positive)
        assert kernel.launches == 1
        return
    found = emulate_split(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library)
    check(variant, call, library, positive=FORMULAS[variant].positive)
    assert launches(found) == [2, 1]


PACKED = packed.Call(packing=Packing.of(70, 150, 170), kv_heads=2, dim=264)
OTHER = packed.Call(packing=packed.OTHER_LENGTHS, q_offset=(-70, 90, 200), group=1, dim=264)


def gradients(inputs: Any, variant: str, **options: Any) -> dict[str, torch.Tensor]:
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    return golden.evaluate(golden.load_op(variant), inputs, family="hopper", **options)


@pytest.mark.covers(mode="packed")
@pytest.mark.parametrize("call", [PACKED, OTHER], ids=["cut blocks", "other lengths"])
@pytest.mark.parametrize("variant", FEW)
def test_packed_backward(monkeypatch: pytest.MonkeyPatch, variant: str, call: packed.Call) -> None:
    found = emulate_split(monkeypatch, variant, Timing.LATE_PRODUCTS, mode="packed")
    inputs = call.inputs(variant)
    got = gradients(inputs, variant, **call.options())
    want = golden.evaluate(reference_of(variant, packed=True), inputs.double(), **call.options())
    check_gradients(got, want)
    assert launches(found) == [2, 1]


@pytest.mark.covers(mode="segmented")
@pytest.mark.parametrize("variant", FEW)
def test_segmented_backward(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    found = emulate_split(monkeypatch, variant, Timing.LATE_PRODUCTS, mode="segmented")
    inputs = SEGMENTED.inputs(variant)
    got = gradients(inputs, variant, **SEGMENTED.options())
    check_gradients(got, golden_of(variant, inputs, **SEGMENTED.options()))
    assert launches(found) == [2, 1]


MUTATIONS = {
    "a piece released while it is read": Mutation(
        old="        p = warpgroup_mma_wait(1, deps=(p,))\n",
        new="",
        error=EmulationError,
        message="overwritten|is read by",
    ),
    "scores used before they are there": Mutation(
        old="    return warpgroup_mma_wait(1, deps=(qk,))\n",
        new="    return qk\n",
        error=EmulationError,
        message="on a Product",
    ),
    "ds put before dp is there": Mutation(
        old="    dp = warpgroup_mma_wait(0, deps=(dp,))\n",
        new="",
        error=EmulationError,
        message="may still|overwritten",
    ),
    "one reader of weights too few": Mutation(
        old="    weights.release(turn)\n", new="", error=DeadlockError, message="no partition"
    ),
    "q released before it is added up": Mutation(
        old="    acc = add_half(acc, weights.take(turn), ring.receive(turn), PART)\n    ring.release(turn)\n",
        new="    tile = ring.receive(turn)\n    ring.release(turn)\n"
        "    acc = add_half(acc, weights.take(turn), tile, PART)\n",
        error=EmulationError,
        message="overwritten|read without a wait",
        call="many blocks",
    ),
    "keys filled while they are read": Mutation(
        old=WAIT_FOR_STAGE + EXPECT,
        new=EXPECT,
        error=EmulationError,
        message="overwritten|more than|no partition|read without a wait",
        call="many blocks",
        programs=1,
    ),
    "too few bytes expected": Mutation(
        old="2 * lse_desc.block_type.nbytes", new="lse_desc.block_type.nbytes", error=EmulationError, message="bytes"
    ),
    "both halves the first": Mutation(
        old="FIRST: gl.constexpr = PART * (tile.shape[1] // ADDERS)",
        new="FIRST: gl.constexpr = 0",
        error=AssertionError,
        message="largest error",
    ),
    "no delta": Mutation(
        old="ds = p * (dp + q_stream.delta.index(q_stage).load(ROW)[None, :])",
        new="ds = p * dp",
        error=AssertionError,
        message="dk: largest error",
    ),
    "no delta of rows": Mutation(
        old="ds = p * (dp + row_delta[:, None])", new="ds = p * dp", error=AssertionError, message="dq: largest error"
    ),
    "no mask of rows": Mutation(
        old="run_bits = columns_before(run_end - start_n, KEY, BLOCK_N)",
        new="run_bits = columns_before(run_end - start_n + 1, KEY, BLOCK_N)",
        error=AssertionError,
        message="dq: largest error",
    ),
}


@with_timings
@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing) -> None:
    mutation = MUTATIONS[name]
    call = mutation.call if mutation.call in CALLS else FOR_EACH
    emulate_split(monkeypatch, mutation.variant, timing, mutation.of, programs=mutation.programs)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[call])
