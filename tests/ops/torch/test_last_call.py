"""A call looks like the one before only if everything that decides what it does is equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generated._runtime.core.schedules import Schedule
from generated._runtime.torch.last_call import LastCall

NAMES = ("scale", "size", "causal", "table")
Q, K = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
TABLE = torch.zeros(3, dtype=torch.int32)


def values(**changed: Any) -> tuple[Any, ...]:
    given = {"q": Q, "k": K, "scale": 0.125, "size": 1000, "causal": True, "table": TABLE} | changed
    return tuple(given.values())


def last_call() -> LastCall:
    return LastCall(values(), NAMES, "plan")


def test_other_tensors_that_look_the_same() -> None:
    q, k = torch.randn_like(Q), torch.randn_like(K)
    found = last_call().pointers(values(q=q, k=k, scale=float("0.125"), size=int("1000")), NAMES)
    assert found is not None
    given, pointers = found
    assert [x is y for x, y in zip(given, (q, k, TABLE), strict=True)] == [True] * 3
    assert pointers == [x.data_ptr() for x in given]


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"q": Q.half()},
    "shape": {"q": Q[:, :2]},
    "strides": {"q": Q.transpose(1, 2).contiguous().transpose(1, 2)},
    "gradient": {"q": Q.clone().requires_grad_()},
    "parameter": {"q": torch.nn.Parameter(Q, requires_grad=False)},
    "no tensor": {"q": None},
    "one tensor twice": {"q": K},
    "at no multiple of 16 bytes": {"k": torch.randn(2 * 4 * 8 * 16 + 1)[1:].view_as(K)},
    "float": {"scale": 0.25},
    "no float": {"scale": None},
    "float for int": {"size": 1000.0},
    "int": {"size": 1001},
    "int for bool": {"causal": 1},
    "bool": {"causal": False},
    "no table": {"table": None},
    "integers": {"table": TABLE.long()},
    "list": {"table": [TABLE]},
    "one more": {"more": None},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_calls_that_look_otherwise(changed: dict[str, Any]) -> None:
    assert last_call().pointers(values(**changed), NAMES) is None


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_differ_in_their_sign(zero: float) -> None:
    last = LastCall(values(scale=zero), NAMES, "plan")
    assert last.pointers(values(scale=-zero), NAMES) is None


def test_other_names() -> None:
    assert last_call().pointers(values(), ("scale", "size", "full", "table")) is None


def test_modes() -> None:
    last = last_call()
    assert last.pointers(values(), NAMES)
    with torch.no_grad():
        assert last.pointers(values(), NAMES) is None
    torch.set_autocast_enabled("cuda", True)
    try:
        assert last.pointers(values(), NAMES) is None
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.inference_mode():
        assert last.pointers(values(), NAMES) is None


def test_a_schedule_is_that_very_one_and_is_not_kept() -> None:
    def made() -> Schedule:
        schedule = Schedule(op="causal", call={}, tiles={}, tables=(torch.zeros(4, dtype=torch.int32),))
        schedule.__dict__["known"] = ("key", [*schedule.tables], [schedule.tables[0].data_ptr()], 0)
        return schedule

    schedule = made()
    last = LastCall(values(table=schedule), NAMES, "plan")
    found = last.pointers(values(table=schedule), NAMES)
    assert found is not None
    assert found[0][2] is schedule.tables[0]
    assert last.pointers(values(table=made()), NAMES) is None
    del found, schedule
    assert last.pointers(values(table=made()), NAMES) is None


@pytest.mark.parametrize("changed", [{"table": [TABLE]}, {"k": Q}], ids=["a list", "one tensor twice"])
def test_calls_that_are_not_compared(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"not compared|one tensor twice"):
        LastCall(values(**changed), NAMES, "plan")
