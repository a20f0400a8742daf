"""Hopper's kernels without a GPU, as Triton 3.8 and later compile them: no view is larger than its memory."""

from __future__ import annotations

import pytest

from emulator import EmulationError, Timing
from tests.kernels.hopper import test_hopper_packed_emulated as packed
from tests.kernels.hopper.test_hopper_backward_emulated import check as check_backward
from tests.kernels.hopper.test_hopper_emulated import Call, Mutation, check, emulate
from tests.kernels.hopper.test_hopper_split_emulated import emulate_split, launches
from tests.support.cases import Shape
from tests.support.packings import Packing

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread", "views_of_given_memory"),
    pytest.mark.covers(mode="dense", family="hopper", direction="forward", dtype="float16", framework="torch"),
]

# By the pieces of 64 columns that q and k have, and v.
CALLS = {
    "three": Call(shape=Shape(q_len=200, kv_len=333, group=1, dim=192, dim_v=136)),
    "three beside a tile in one": Call(shape=Shape(q_len=300, kv_len=256, dim=168, dim_v=128), q_offset=-150),
}
WIDE_CALLS = {
    "five and seven": Call(shape=Shape(q_len=70, kv_len=100, dim=264, dim_v=400)),
    "six and eight": Call(shape=Shape(q_len=100, kv_len=133, dim=384, dim_v=512)),
}


@pytest.fixture
def views_of_given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.kernel.VIEWS_GROW", False)


@pytest.mark.parametrize("timing", list(Timing), ids=lambda timing: timing.name.lower())
@pytest.mark.parametrize("name", CALLS)
def test_forward(monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing) -> None:
    kernel = emulate(monkeypatch, "causal", timing)
    check("causal", CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize("name", WIDE_CALLS)
def test_wide_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, stem="hopper_fwd_wide")
    check("causal", WIDE_CALLS[name])
    assert kernel.launches == 1


@pytest.mark.covers(mode="packed")
def test_packed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, mode="packed")
    packed.check("causal", packed.Call(packing=Packing.of(100, 233, 301), kv_heads=2, dim=192))
    assert kernel.launches == 1


@pytest.mark.covers(direction="backward")
@pytest.mark.parametrize("name", WIDE_CALLS)
def test_split_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = emulate_split(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    check_backward("causal", WIDE_CALLS[name])
    assert launches(found) == [2, 1]


MUTATIONS = {
    "a view of more than the pieces": Mutation(
        old="COLS: gl.constexpr = GROUP[1] * self.tiles.shape[-1]",
        new="COLS: gl.constexpr = 2 * GROUP[1] * self.tiles.shape[-1]",
        error=EmulationError,
        message=r"as \[",
    ),
    "pieces of a stage side by side": Mutation(
        old="self.tiles.index(stage * COUNT + (FIRST * (self.stages - 1) + i))",
        new="self.tiles.index(stage * self.pieces + i)",
        error=EmulationError,
        message="read",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check("causal", CALLS["three"])
