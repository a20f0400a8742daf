"""Calls on paged caches with tiles given by the caller, against float64 of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.kernels.test_paged import check, draw_case

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
CONFIG = {
    "decode": {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2, "keys_per_split": 40},
    "paged_fwd": {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 2},
}


@pytest.mark.parametrize(("page_size", "queries"), [(16, (2,) * 5), (48, (30, 0, 1, 40, 2))])
@pytest.mark.parametrize("variant", ["alibi", "streaming_llm", "gpt_oss"])
def test_tiles_of_a_call(variant: str, page_size: int, queries: Sequence[int]) -> None:
    case = draw_case(variant, page_size, queries)
    check(case.got(config=CONFIG), case.expected())


@pytest.mark.parametrize("config", [{"fwd": CONFIG["paged_fwd"]}, {"dq": CONFIG["paged_fwd"]}, {}])
def test_what_dense_calls_take(config: dict[str, Any]) -> None:
    case = draw_case("causal", 16, (30, 0, 1, 40, 2))
    check(case.got(config=config), case.expected())


def test_a_plan_is_made_for_a_config() -> None:
    case = draw_case("causal", 16, (1,) * 5)
    from generated.torch import causal

    plan = causal.plan(case.q, case.k, config=CONFIG, **case.kwargs)
    assert torch.equal(case.call(schedule=plan, config=CONFIG)[0], case.call(config=CONFIG)[0])
    with pytest.raises(ValueError, match="schedule: expected one made for config"):
        case.call(schedule=plan)
