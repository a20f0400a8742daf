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
        ({"size": "9"}, "plan: window: size: expected an int, got '9'"),
        ({"size": 3.5}, "plan: window: size: expected an int, got 3.5"),
        ({"cu_seqlens": [[0], [1, 64]]}, "plan: cu_seqlens: expected integers [n + 1] from 0 to seq = 64 that never"),
        ({"segment_ids": [[0], [1, 64]]}, "plan: segment_ids: expected integers [64] or [B, 64], got "),
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


def test_tensors_of_the_mask_have_the_rows_of_all_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"plan: document: doc: expected at least 64 rows, those of all ranks, got shape"
    ):
        plan(load_op("document"), 2, seq=64, heads=(4, 2), head_dim=16, doc=[[0] * 9])


def test_a_rank_has_fewer_rows_than_all_ranks() -> None:
    """Else nothing would tell a tensor of a rank's rows from one of all rows."""
    with pytest.raises(
        ValueError, match="plan: seq: expected more than 2 rows, which each rank gets with padding, got 2"
    ):
        plan(load_op("causal"), 2, seq=2, heads=(4, 2), head_dim=16, balance="zigzag", strategy="gather")
