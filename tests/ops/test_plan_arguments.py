"""Arguments of `plan` and of a `Machine` that no plan can use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

import generated.jax as jax_ops
import generated.torch as torch_ops
from codegen.testing.calls import load_op
from generated import jax_parallel
from generated._runtime.core.parallel.work import work_of
from generated.torch_parallel import Machine, context_parallel, plan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"cu_seqlen": [0, 9, 64]},
            "plan: cu_seqlen: expected an option of plan or an argument of window, whose mask reads size, got [0, 9",
        ),
        ({"size": "9"}, "plan: window: size: expected an int of at least 1, got '9'"),
        ({"size": 3.5}, "plan: window: size: expected an int of at least 1, got 3.5"),
        ({"size": 0}, "plan: window: size: expected an int of at least 1, got 0"),
        ({"size": True}, "plan: window: size: expected an int of at least 1, got True"),
        ({"size": 10**30}, "plan: window: size: expected an int of at most 2**30 either way, got 1000000000000000"),
        ({"cu_seqlens": [[0], [1, 64]]}, "plan: cu_seqlens: expected integers [n + 1] from 0 to seq = 64 that never"),
        ({"segment_ids": [[0], [1, 64]]}, "plan: segment_ids: expected integers [64] or [B, 64], got "),
        ({"segment_ids": np.zeros((0, 64), np.int32)}, "plan: segment_ids: expected integers [64] or [B, 64], got "),
        ({"size": [3, 4]}, "plan: window: size: expected an int of at least 1, got [3, 4]"),
        ({"balance": ["work"]}, "plan: balance: expected 'work' or 'zigzag' or 'contiguous', got ['work']"),
        ({"head_groups": 2, "strategy": "ring"}, "plan: head_groups: expected None or 1 with a ring, got 2"),
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


@pytest.mark.parametrize("flag", ["check", "sum_gradients"])
def test_options_of_context_parallel_are_true_or_false(flag: str) -> None:
    layout, options = plan(load_op("causal"), 2, seq=64, heads=(4, 2), head_dim=16), dict[str, Any]({flag: "no"})
    with pytest.raises(ValueError, match=f"context_parallel: {flag}: expected True or False, got 'no'"):
        context_parallel(load_op("causal"), layout, **options)


def test_tensors_of_the_mask_have_the_rows_of_all_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"plan: document: doc: expected at least 64 rows, those of all ranks, got shape"
    ):
        plan(load_op("document"), 2, seq=64, heads=(4, 2), head_dim=16, doc=[[0] * 9])


@pytest.mark.parametrize(
    ("doc", "got"),
    [
        (3, "shape []"),
        (np.zeros((1, 1, 64), np.int32), "shape [1, 1, 64]"),
        ([[1, 2], [3]], "[[1, 2], [3]]"),
    ],
)
def test_tensors_of_the_mask_have_their_dims(doc: Any, got: str) -> None:
    with pytest.raises(ValueError, match="plan: document: doc: ") as raised:
        plan(load_op("document"), 2, seq=64, heads=(4, 2), head_dim=16, doc=doc)
    assert str(raised.value) == f"plan: document: doc: expected an array [b, kv_idx] or [kv_idx], got {got}"


def test_scalars_that_only_the_score_reads_are_checked_too() -> None:
    with pytest.raises(ValueError, match="plan: band_softcap: cap: expected a number that is not NaN, got nan"):
        plan(load_op("band_softcap"), 2, seq=64, heads=(4, 2), head_dim=16, before=3, after=4, cap=float("nan"))


def test_arrays_of_a_trace_are_refused() -> None:
    def planned(size: jax.Array) -> jax.Array:
        jax_parallel.plan(jax_ops.window, 2, seq=64, heads=(4, 2), head_dim=16, size=size)
        return size

    with pytest.raises(ValueError, match=r"plan: window: size: expected an array with values, got a traced array \[\]"):
        jax.jit(planned)(4)


def test_tensors_of_the_mask_have_values() -> None:
    doc = torch.zeros(1, 64, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"plan: document: doc: expected an array with values, got a meta tensor \[1"):
        plan(load_op("document"), 2, seq=64, heads=(4, 2), head_dim=16, doc=doc)


@pytest.mark.parametrize("plan_of", [plan, jax_parallel.plan])
def test_segment_ids_of_more_than_32_bits_are_refused(plan_of: Any) -> None:
    """A call's ids are int32: cut to 32 bits, these documents would be one."""
    ids = np.arange(64) // 16 * 2**32
    op = (torch_ops if plan_of is plan else jax_ops).causal
    with pytest.raises(ValueError, match="plan: segment_ids: expected values that int32 holds, got 4294967296"):
        plan_of(op, 2, seq=64, heads=(4, 2), head_dim=16, segment_ids=ids)


@pytest.mark.parametrize("ranks", [2, (2, 2)])
def test_groups_of_heads_are_those_asked_for(ranks: Any) -> None:
    """Inside nodes, too; the prediction is that of these groups."""
    options: dict[str, Any] = {"seq": 2**17, "heads": (32, 8), "head_dim": 64}
    options |= {"strategy": "gather"} if ranks == 2 else {}
    layouts = {groups: plan(load_op("causal"), ranks, **options, head_groups=groups) for groups in (1, 2, 4)}
    assert [(layout.nodes or layout).head_groups for layout in layouts.values()] == [1, 2, 4]
    assert [layout.cost.groups for layout in layouts.values() if layout.cost] == [1, 2, 4]
    assert len({layout.predicted for layout in layouts.values()}) == 3


def test_costs_are_compared_for_the_groups_asked_for() -> None:
    """Every reason names the costs of these groups: those of strategies that were not chosen, too."""
    sizes: dict[str, Any] = {"seq": 2**17, "heads": (32, 8), "head_dim": 64}
    layouts = {groups: plan(load_op("causal"), 8, **sizes, head_groups=groups) for groups in (1, 2, 4)}
    for groups, layout in layouts.items():
        assert layout.strategy == "heads"
        gather = next(reason for reason in layout.reasons if reason.startswith("gather: "))
        assert (f"in {groups} groups" in gather) == (groups > 1)


def test_variants_that_count_heads_are_predicted_with_one_group() -> None:
    counts_heads = replace(work_of(load_op("causal")), by_heads=False)
    sizes: dict[str, Any] = {"seq": 2**17, "heads": (32, 8), "head_dim": 64}
    layout = plan(counts_heads, 8, **sizes)
    assert layout.head_groups == 1
    assert layout.predicted == plan(load_op("causal"), 8, **sizes, strategy="gather", head_groups=1).predicted


def test_a_number_of_numpy_is_a_number() -> None:
    sizes: dict[str, Any] = {"seq": 4096, "heads": (8, 4), "head_dim": 64}
    assert plan(load_op("window"), 2, **sizes, size=np.int64(64)) == plan(load_op("window"), 2, **sizes, size=64)


def test_nodes_of_one_rank_split_no_heads() -> None:
    counts_heads = replace(work_of(load_op("causal")), by_heads=False)
    assert plan(counts_heads, (2, 1), seq=64, heads=(4, 2), head_dim=16).strategy == "2d"


def test_a_rank_has_fewer_rows_than_all_ranks() -> None:
    """Else nothing would tell a tensor of a rank's rows from one of all rows."""
    with pytest.raises(
        ValueError, match="plan: seq: expected more than 2 rows, which each rank gets with padding, got 2"
    ):
        plan(load_op("causal"), 2, seq=2, heads=(4, 2), head_dim=16, balance="zigzag", strategy="gather")
