"""Schedules of packed calls: they change no bit, and serve no other call than the one they were made for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from tests.support.cases import Shape as DenseShape
from tests.support.cases import assert_same, draw, evaluate, tiles, with_variants
from tests.support.packings import MIXED, OFFSETS, SMALL_TILES, THREE, Packing, draw_packed, with_kinds

pytestmark = pytest.mark.covers(mode="packed", family="portable", dtype="float16", framework="torch")


def _schedule(variant: str, inputs: Inputs, **options: Any) -> Any:
    return make_schedule(golden.load_op(variant), inputs, config=SMALL_TILES, **options)


def _scheduled(variant: str, inputs: Inputs, schedule: Any, **options: Any) -> dict[str, Tensor]:
    return evaluate(variant, inputs, **{"config": SMALL_TILES, "schedule": schedule, **options})


@with_variants
def test_a_schedule_changes_no_bit(variant: str) -> None:
    inputs = draw_packed(variant, MIXED, dim=32)
    options = {"q_offset": OFFSETS["tensor"](), **MIXED.options()}
    schedule = _schedule(variant, inputs, **options)
    want = _scheduled(variant, inputs, None, **options)
    for _ in range(2):
        for name, got in _scheduled(variant, inputs, schedule, **options).items():
            assert_same(variant, name, got, want[name])


@with_kinds
def test_a_schedule_of_a_forward_alone(variant: str) -> None:
    inputs = draw_packed(variant, THREE, dim=32)
    schedule = _schedule(variant, inputs, backward=False, **THREE.options())
    want = _scheduled(variant, inputs, None, **THREE.options())
    for name, got in _scheduled(variant, inputs, schedule, **THREE.options()).items():
        assert_same(variant, name, got, want[name])


PACKED_90 = Packing.of(15, 90)
# What is different from the call that the schedule was made for.
OTHERS: dict[str, tuple[Packing, dict[str, Any]]] = {
    "total": (Packing.of(15, 80), {}),
    "sequences": (Packing.of(15, 40, 90), {}),
    "keys": (Packing(q=(0, 15, 90), k=(0, 15, 80)), {}),
    "tiles": (PACKED_90, {"config": tiles(64, 64)}),
    "offset": (PACKED_90, {"q_offset": 7}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_schedule_of_another_packed_call_is_refused(other: str) -> None:
    schedule = _schedule("causal", draw_packed("causal", PACKED_90, dim=32), **PACKED_90.options())
    packing, options = OTHERS[other]
    inputs = draw_packed("causal", packing, dim=32)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", inputs, schedule, **packing.options(), **options)


def test_a_packed_schedule_of_another_op_is_refused() -> None:
    schedule = _schedule("causal", draw_packed("causal", PACKED_90, dim=32), **PACKED_90.options())
    inputs = draw_packed("window", PACKED_90, dim=32)
    with pytest.raises(ArgumentError, match=r"^window: schedule: expected one made by window.schedule, got "):
        _scheduled("window", inputs, schedule, **PACKED_90.options())


def test_a_schedule_is_for_packed_or_for_dense_calls() -> None:
    """Of as many rows and heads."""
    packed, dense = draw_packed("causal", Packing.of(90), dim=32), draw("causal", DenseShape(q_len=90, dim=32))
    options = Packing.of(90).options()
    of_packed, of_dense = _schedule("causal", packed, **options), _schedule("causal", dense)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", dense, of_packed)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", packed, of_dense, **options)
