"""Hopper's forward for more than 256 columns without a GPU: dense, packed and segmented calls."""

from __future__ import annotations

import pytest

from emulator import DeadlockError, EmulationError, Timing
from tests.kernels.hopper import test_hopper_packed_emulated as packed
from tests.kernels.hopper import test_hopper_segmented_emulated as segmented
from tests.kernels.hopper.test_hopper_emulated import (
    FEW,
    PROGRAMS,
    VARIANTS,
    Call,
    Mutation,
    check,
    emulate,
    with_timings,
)
from tests.support.cases import Shape
from tests.support.packings import Packing
from tests.support.segments import Call as SegmentedCall
from tests.support.segments import restarting, runs

STEM = "hopper_fwd_wide"

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="forward", dtype="float16", framework="torch"),
]

# Tiles have 64 rows and 32 keys.
CALLS = {
    "cut blocks": Call(shape=Shape(q_len=100, kv_len=133, dim=512)),
    "rows without keys": Call(shape=Shape(q_len=150, kv_len=120, dim=512), q_offset=-70),
    "an offset per row": Call(shape=Shape(q_len=70, kv_len=130, batch=2, group=1, dim=512), q_offset=(-40, 60)),
    "five blocks": Call(shape=Shape(q_len=320, kv_len=320, group=1, dim=264), transposed=True),
    "jumping scores": Call(
        shape=Shape(q_len=128, kv_len=384, group=1, dim=512), q_offset=250, positions=384, jumps=True
    ),
    "few columns of the second half": Call(shape=Shape(q_len=70, kv_len=100, dim=320)),
    "a second half in parts": Call(shape=Shape(q_len=70, kv_len=100, dim=264, dim_v=400)),
    "narrow values": Call(shape=Shape(q_len=70, kv_len=100, dim=512, dim_v=72)),
    "narrow keys": Call(shape=Shape(q_len=70, kv_len=100, dim=40, dim_v=512)),
}
FOR_EACH = "cut blocks"

PACKED = {
    "cut blocks": packed.Call(packing=Packing.of(100, 233, 301), kv_heads=2, dim=512),
    "other lengths": packed.Call(packing=packed.OTHER_LENGTHS, q_offset=(-70, 90, 200), group=1, dim=320),
}

SEGMENTS = (runs((4, 50), (5, 70)), runs((1, 40), (2, 60), (3, 20)))
SEGMENTED = SegmentedCall(
    shape=Shape(q_len=120, batch=2, group=1, dim=512),
    tokens={"q_segment_ids": list(SEGMENTS), "q_positions": [restarting(each) for each in SEGMENTS]},
)


@pytest.mark.parametrize(
    ("variant", "name"),
    [*((each, FOR_EACH) for each in VARIANTS), *((each, name) for each in FEW for name in CALLS if name != FOR_EACH)],
)
def test_forward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, stem=STEM)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize("name", ["an offset per row", "five blocks"])
@pytest.mark.parametrize("variant", FEW)
def test_forward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS, stem=STEM)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.covers(mode="packed")
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("variant", FEW)
def test_packed_forward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, mode="packed", stem=STEM)
    packed.check(variant, PACKED[name])
    assert kernel.launches == 1


@pytest.mark.covers(mode="segmented")
@pytest.mark.parametrize("variant", FEW)
def test_segmented_forward(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, mode="segmented", stem=STEM)
    segmented.check_forward(variant, SEGMENTED)
    assert kernel.launches == 1


WAIT_FOR_WEIGHTS = "        mbarrier.wait(self.full.index(stage), (turn // WEIGHT_STAGES) & 1)\n"
SUMS = "        return warpgroup_mma_wait(0, deps=(left, right))\n"
RELEASES = (
    "        v_ring.release(turn + 1)\n        mbarrier.arrive(self.empty.index(stage), count=1)\n        return acc\n"
)
MUTATIONS = {
    "no wait for weights": Mutation(
        old=WAIT_FOR_WEIGHTS, new="", error=EmulationError, message="read without a wait|read before|go on"
    ),
    "weights stored without a fence": Mutation(
        old="        fence_async_shared()\n", new="", error=EmulationError, message="fence"
    ),
    "weights overwritten while they are read": Mutation(
        old="        mbarrier.wait(self.empty.index(stage), ((turn // WEIGHT_STAGES) & 1) ^ 1)\n",
        new="",
        error=EmulationError,
        message="overwritten|more than|no partition",
    ),
    "values released while they are read": Mutation(
        old=SUMS,
        new="        return warpgroup_mma_wait(1, deps=(left, right))\n",
        error=EmulationError,
        message="overwritten|may still run",
    ),
    "weights never released": Mutation(
        old=RELEASES,
        new="        v_ring.release(turn + 1)\n        return acc\n",
        error=DeadlockError,
        message="no part",
    ),
    "values of the block before": Mutation(
        old="v_ring.receive(turn + 1)", new="v_ring.receive(turn)", error=EmulationError, message="read|go on"
    ),
    "the first turn of values not released": Mutation(
        old="    v_ring.release(0)\n", new="", error=DeadlockError, message="no partition"
    ),
    "both halves the first": Mutation(
        old="FIRST: gl.constexpr = PART * (tile.shape[1] // ADDERS)",
        new="FIRST: gl.constexpr = 0",
        error=AssertionError,
        message="largest error",
    ),
    "sums not rescaled": Mutation(
        old="mul.f32 ${i}, ${i}, ${2 * COUNT + i};",
        new="mov.b32 ${i}, ${i};",
        error=AssertionError,
        message="largest error",
        call="jumping scores",
    ),
    "factors of a row not waited for": Mutation(
        old="        mbarrier.wait(self.has_inverses.index(0), q_turn & 1)\n",
        new="",
        error=EmulationError,
        message="read",
    ),
    "factors of a row overwritten": Mutation(
        old="        mbarrier.wait(self.no_inverses.index(0), (q_turn & 1) ^ 1)\n",
        new="",
        error=EmulationError,
        message="overwritten|more than|no partition",
        call="five blocks",
        programs=1,
    ),
    "q released before its last product": Mutation(
        old="        q_tile = q_ring.receive(q_turn)  # [ROWS, BLOCK_D]\n",
        new="        q_tile = q_ring.receive(q_turn)\n        q_ring.release(q_turn)\n",
        error=EmulationError,
        message="overwritten|more than|read without a wait",
        call="five blocks",
        programs=1,
    ),
    "no mask": Mutation(
        old="qk = gl.where(keep, qk, ", new="qk = gl.where(True, qk, ", error=AssertionError, message="lse"
    ),
}


@with_timings
@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing) -> None:
    mutation = MUTATIONS[name]
    call = mutation.call if mutation.call in CALLS else FOR_EACH
    emulate(monkeypatch, mutation.variant, timing, mutation.of, programs=mutation.programs, stem=STEM)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[call])


def test_tiles_fill_programs() -> None:
    """The calls have more blocks of rows than programs, so that programs compute several."""
    assert CALLS["five blocks"].shape.q_len > 64 * PROGRAMS
