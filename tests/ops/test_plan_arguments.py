"""Arguments of `plan` and of a `Machine` that no plan can use."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.testing.calls import load_op
from generated.torch_parallel import Machine, plan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"cu_seqlen": [0, 9, 64]},
            "plan: cu_seqlen: expected an option of plan or an argument of window, whose mask reads size, got [0, 9",
        ),
        ({"size": "9"}, "plan: window: size: expected a number or an array, got '9'"),
        ({"machine": {"link": 1e9}}, "plan: machine: expected a Machine or None, got dict"),
        (
            {"masks": [load_op("causal")]},
            "plan: masks: expected at least one pair (op, its arguments), in a sequence, got",
        ),
    ],
)
def test_arguments_that_no_plan_has_are_refused(options: dict[str, Any], text: str) -> None:
    given = {"size": 9} | options if "masks" not in options else options
    with pytest.raises(ValueError, match="plan: ") as raised:
        plan(load_op("window"), 2, seq=64, heads=(4, 2), head_dim=16, **given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("rates", [{"link": 0}, {"memory": "20e9"}, {"forward": float("nan")}, {"node": 2.5}])
def test_rates_are_positive_numbers(rates: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Machine: {next(iter(rates))}: expected a"):
        Machine(**rates)
