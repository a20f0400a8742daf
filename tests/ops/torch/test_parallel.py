"""Context parallelism: every variant over simulated ranks against float64, and the errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan
from tests.support.cases import VARIANTS
from tests.support.ranks import ThreadRank, grid_of, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

HEADS, DIM, BATCH = (8, 2), 16, 2
ROWS = {"q": 2, "k": 2, "v": 2, "o": 2, "lse": 2, "g": 1}
BSHD_ROWS = {"q": 1, "k": 1, "v": 1, "o": 1, "lse": 2, "g": 1}
PACKED_ROWS = {"q": 0, "k": 0, "v": 0, "o": 0, "lse": 1, "g": 0}
"""The axis of rows."""

STRATEGIES = ("heads", "gather", "exchange", "ring", "2d")
NO_RING = ("band_images", "forgetting_pruned")
"""Variants that read a tensor at rows of queries and of keys, and attend to keys after a query or compute with
positions themselves."""

NOTHING: Mapping[str, Any] = {}


def draw(
    variant: str, seq: int, batch: int = BATCH, heads: tuple[int, int] = HEADS, package: str = "generated"
) -> calls.Inputs:
    shape = calls.Shape(batch=batch, heads=heads[0], kv_heads=heads[1], seq=seq, dim=DIM)
    return calls.draw_inputs(calls.load_manifest(package)[variant], shape, dtype=torch.float32, device="cpu")


def gradients(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss of o and lse; a row without keys has an lse of -inf, which the loss does not read."""
    finite = torch.where(torch.isinf(lse), 0.0, lse)
    loss = (o * do).sum() + (finite * dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    given = zip(leaves.items(), found, strict=True)
    return {f"d{name}": torch.zeros_like(x) if grad is None else grad for (name, x), grad in given}


def on_rank(
    comm: ThreadRank,
    op: Any,
    inputs: calls.Inputs,
    rows: Mapping[str, int],
    plan_options: Mapping[str, Any],
    options: Mapping[str, Any] = NOTHING,
    tokens: Mapping[str, Tensor] = NOTHING,
) -> dict[str, Tensor]:
    """Results and gradients that one rank computes, unsharded over all ranks."""
    seq = inputs.q.shape[rows["q"]]
    heads = (inputs.q.shape[1 if rows["q"] != 1 else 2], inputs.k.shape[1 if rows["k"] != 1 else 2])
    read: dict[str, Any] = {
        name: x
        for name, x in {**inputs.tensors, **inputs.scalars}.items()
        if name not in ("g", "sink", "dropout_p", "seed")
    }
    mesh = grid_of(comm, 2) if plan_options.get("strategy") == "2d" else comm
    layout = plan(op, mesh, seq=seq, heads=heads, head_dim=DIM, **plan_options, **read)

    def local(name: str, x: Tensor) -> Tensor:
        part = layout.shard(x.detach(), rows[name]) if name in rows else x.detach().clone()
        return part.requires_grad_(x.requires_grad)

    q, k, v = (local(name, x) for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)))
    own = {name: local(name, x) for name, x in inputs.tensors.items()}
    ids = {name: layout.shard(x, 1) for name, x in tokens.items()}
    call = context_parallel(op, layout)
    o, lse = call(q, k, v, **own, **inputs.scalars, **options, **ids, return_lse=True)
    leaves = {"q": q, "k": k, "v": v} | {name: x for name, x in own.items() if x.requires_grad}
    do, dlse = layout.shard(inputs.do, rows["o"]), layout.shard(inputs.dlse, rows["lse"])
    found = {"o": o.detach(), "lse": lse.detach()} | gradients(o, lse, do, dlse, leaves)
    axes = {f"d{name}": axis for name, axis in rows.items()} | {"o": rows["o"], "lse": rows["lse"]}
    return {name: layout.unshard(x, axes[name]) if name in axes else x for name, x in found.items()}


def check(
    variant: str,
    inputs: calls.Inputs,
    rows: Mapping[str, int],
    *,
    ranks: int,
    plan_options: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    of_reference: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Tensor] | None = None,
    packed: bool = False,
    package: str = "generated",
) -> None:
    """Compare every rank's results with float64."""
    exact = inputs.double()
    reference = calls.load_reference(variant, packed=packed, package=package)
    o, lse = exact.call(reference, return_lse=True, **(options or {}), **(of_reference or {}), **(tokens or {}))
    want = {"o": o.detach(), "lse": lse.detach()} | gradients(o, lse, exact.do, exact.dlse, exact.leaves())
    op = calls.load_op(variant, package)

    def of_rank(comm: ThreadRank) -> dict[str, Tensor]:
        return on_rank(comm, op, inputs, rows, plan_options, options or {}, tokens or {})

    if plan_options.get("strategy") == "ring" and variant in NO_RING:
        with pytest.raises(
            ValueError, match="plan: strategy: expected 'gather', 'exchange' or 'auto', got 'ring' with"
        ):
            run_ranks(ranks, of_rank)
        return

    for rank, got in enumerate(run_ranks(ranks, of_rank)):
        for name, wanted in want.items():
            both = [torch.nan_to_num(x.double(), neginf=0.0) for x in (got[name], wanted)]
            error = (both[0] - both[1]).abs().max() / both[1].abs().max().clamp_min(1e-3)
            assert error < calls.BOUND[torch.float32], f"{name} of rank {rank}: {error:.1e}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_give_the_results_of_one(variant: str, layout: str, strategy: str, ranks: int) -> None:
    inputs = draw(variant, seq=70)
    if layout == "bshd":
        q, k, v, do = (
            x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)
            for x in (inputs.q, inputs.k, inputs.v, inputs.do)
        )
        inputs = replace(inputs, q=q, k=k, v=v, do=do)
    rows = ROWS if layout == "bhsd" else BSHD_ROWS
    check(variant, inputs, rows, ranks=ranks, plan_options={"strategy": strategy}, options={"layout": layout})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_are_cut_anywhere(variant: str, strategy: str, ranks: int) -> None:
    entry = calls.load_manifest()[variant]
    inputs = calls.packed(entry, draw(variant, seq=23, batch=3))
    ends = torch.arange(0, 70, 23, dtype=torch.int32)
    options = {"strategy": strategy, "cu_seqlens": ends}
    check(
        variant,
        inputs,
        PACKED_ROWS,
        ranks=ranks,
        plan_options=options,
        of_reference={"cu_seqlens_q": ends},
        packed=True,
    )


@pytest.mark.parametrize("ends", [(0, 150, 170, 200), (0, 20, 41, 97, 130, 137, 200), (0, 3, 200)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["gather", "exchange", "ring"])
def test_documents_of_any_lengths_are_dealt(strategy: str, ranks: int, ends: tuple[int, ...]) -> None:
    """Ranks have different numbers of keys of their documents, but all take part in the same exchanges."""
    for variant in ("causal", "gpt_oss", "forgetting", "causal_dropout"):
        entry = calls.load_manifest()[variant]
        inputs = calls.packed(entry, draw(variant, seq=200, batch=1))
        begins = torch.tensor(ends, dtype=torch.int32)
        options = {"strategy": strategy, "cu_seqlens": begins}
        given = {"cu_seqlens_q": begins}
        check(variant, inputs, PACKED_ROWS, ranks=ranks, plan_options=options, of_reference=given, packed=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", ["causal", "causal_dropout", "window", "forgetting"])
@pytest.mark.parametrize("given", ["to the plan", "to the call"])
def test_documents_in_rows_are_kept_apart(variant: str, given: str, strategy: str) -> None:
    inputs = draw(variant, seq=70)
    ids = torch.tensor([0] * 9 + [1] * 40 + [2] * 21, dtype=torch.int32).expand(BATCH, -1).contiguous()
    options: dict[str, Any] = {"strategy": strategy}
    if given == "to the plan":
        options["segment_ids"] = ids
        check(variant, inputs, ROWS, ranks=2, plan_options=options, of_reference={"q_segment_ids": ids})
    else:
        check(variant, inputs, ROWS, ranks=2, plan_options=options, tokens={"q_segment_ids": ids})


def test_positions_are_those_of_the_rows_they_come_with() -> None:
    """Positions restart in the second document of a row: an op that reads nothing by row takes them by any strategy."""
    inputs = draw("window", seq=64)
    ids = (torch.arange(64, dtype=torch.int32) // 32).expand(BATCH, -1).contiguous()
    tokens = {"q_segment_ids": ids, "q_positions": (torch.arange(64, dtype=torch.int32) % 32).expand(BATCH, -1)}
    for strategy in STRATEGIES:
        check("window", inputs, ROWS, ranks=2, plan_options={"strategy": strategy}, tokens=tokens)


@pytest.mark.parametrize("seq", [4, 5, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_have_padding_alone(seq: int, strategy: str) -> None:
    for variant in ("causal", "alibi"):
        check(variant, draw(variant, seq=seq), ROWS, ranks=4, plan_options={"strategy": strategy})


@pytest.mark.parametrize("balance", ["work", "zigzag", "contiguous"])
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("variant", ["band_bias", "gpt_oss"])
def test_any_deal_and_any_groups_of_heads(variant: str, head_groups: int, balance: str) -> None:
    options = {"strategy": "gather", "head_groups": head_groups, "balance": balance}
    check(variant, draw(variant, seq=64), ROWS, ranks=4, plan_options=options)


@pytest.mark.parametrize(("seq", "head_groups"), [(64, 1), (64, 2), (61, 2), (61, 4)])
@pytest.mark.parametrize("variant", ["alibi", "gpt_oss", "causal_dropout"])
def test_heads_may_be_exchanged_in_groups(variant: str, seq: int, head_groups: int) -> None:
    options = {"strategy": "heads", "head_groups": head_groups}
    check(variant, draw(variant, seq=seq, heads=(16, 8)), ROWS, ranks=2, plan_options=options)


def test_more_ranks_than_key_heads() -> None:
    inputs = draw("alibi", seq=40, heads=(12, 3))
    check("alibi", inputs, ROWS, ranks=4, plan_options={"strategy": "heads"})
    inputs = draw("gpt_oss", seq=40, heads=(8, 1))
    check("gpt_oss", inputs, ROWS, ranks=8, plan_options={"strategy": "heads"})


@pytest.mark.parametrize("planned", ["the same mask", "another window", "another op", "other documents"])
def test_only_a_mask_of_the_plan_exchanges(planned: str) -> None:
    """Every other call gathers all keys."""
    inputs, other = draw("document", seq=64), planned == "another op"
    if planned.endswith("window"):
        inputs = draw("window", seq=64)
    op = calls.load_op("window" if planned.endswith("window") else "document")
    want = calls.evaluate(op, inputs)
    read: dict[str, Any] = {**inputs.tensors, **inputs.scalars}
    if planned == "another window":
        read["size"] += 1
    elif planned == "other documents":
        read["doc"] = read["doc"] + (torch.arange(64) > 40)

    def of_rank(comm: ThreadRank) -> tuple[dict[str, Tensor], list[str]]:
        options: dict[str, Any] = {"seq": 64, "heads": HEADS, "head_dim": DIM, "strategy": "exchange"}
        layout = plan(calls.load_op("causal"), comm, **options) if other else plan(op, comm, **options, **read)
        q, k, v = (layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        comm.calls.clear()
        call = context_parallel(op, layout, check=False)
        o, lse = call(q, k, v, **inputs.tensors, **inputs.scalars, return_lse=True)
        do, dlse = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
        found = gradients(o, lse, do, dlse, {"q": q, "k": k, "v": v}) | {"o": o.detach(), "lse": lse.detach()}
        sent = list(comm.calls)
        return {name: layout.unshard(x, 2) for name, x in found.items()}, sent

    for got, sent in run_ranks(2, of_rank):
        expected = {"exchange"} if planned == "the same mask" else {"all_gather", "reduce_scatter"}
        assert set(sent) == expected
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=1e-4, atol=1e-5)


def test_results_are_those_of_one_rank_to_rounding() -> None:
    """Kernels give equal bits, see tests/kernels; on the CPU torch's products differ with their sizes."""
    inputs, op = draw("causal", seq=64), calls.load_op("causal")
    o, lse = inputs.call(op, return_lse=True)
    one = {"o": o, "lse": lse} | gradients(o, lse, inputs.do, inputs.dlse, inputs.leaves())
    for strategy, names in (("heads", one), ("gather", ("o", "lse"))):
        options = {"strategy": strategy, "head_groups": 1}
        for got in run_ranks(2, partial(on_rank, op=op, inputs=inputs, rows=ROWS, plan_options=options)):
            for name in names:
                assert (got[name] - one[name]).abs().max() <= 2e-6, name


def test_a_row_sharded_tensor_gets_the_gradient_of_its_rows() -> None:
    """The bias of `band_bias`, read by query and key, may be cut by query rows; its gradient then has these rows."""
    inputs, op = draw("band_bias", seq=64), calls.load_op("band_bias")
    whole = calls.evaluate(op, inputs)["dbias"]

    def of_rank(comm: ThreadRank) -> Tensor:
        layout = plan(op, comm, seq=64, heads=HEADS, head_dim=DIM, strategy="gather", balance="zigzag")
        q, k, v = (layout.shard(x.detach(), 2) for x in (inputs.q, inputs.k, inputs.v))
        bias = layout.shard(inputs.tensors["bias"].detach(), 2).requires_grad_()
        call = context_parallel(op, layout)
        o, lse = call(q, k, v, bias=bias, **inputs.scalars, return_lse=True)
        do, dlse = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
        return layout.unshard(gradients(o, lse, do, dlse, {"bias": bias})["dbias"], 2)

    for got in run_ranks(2, of_rank):
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


def test_gradients_may_be_left_to_whoever_adds_up_all() -> None:
    inputs, op = draw("alibi", seq=64), calls.load_op("alibi")
    whole = calls.evaluate(op, inputs)["dslope"]

    def of_rank(comm: ThreadRank) -> Tensor:
        layout = plan(op, comm, seq=64, heads=HEADS, head_dim=DIM, strategy="gather")
        q, k, v = (layout.shard(x.detach(), 2) for x in (inputs.q, inputs.k, inputs.v))
        slope = inputs.tensors["slope"].detach().clone().requires_grad_()
        o, lse = context_parallel(op, layout, sum_gradients=False)(q, k, v, slope=slope, return_lse=True)
        do, dlse = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
        return gradients(o, lse, do, dlse, {"slope": slope})["dslope"]

    torch.testing.assert_close(sum(run_ranks(2, of_rank)), whole, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- errors


def refused(of_rank: Any, ranks: int = 2) -> list[str]:
    """The message of the error that each rank raises."""

    def message(comm: ThreadRank) -> str:
        try:
            of_rank(comm)
        except (TypeError, ValueError) as error:
            return str(error)
        return "nothing"

    return run_ranks(ranks, message)


def tensors(comm: ThreadRank, rows: int = 32) -> tuple[Any, Tensor]:
    layout = plan(calls.load_op("causal"), comm, seq=64, heads=(4, 4), head_dim=16, strategy="gather")
    return layout, torch.zeros(1, 4, rows, 16)


def test_the_error_of_one_rank_is_an_error_of_all() -> None:
    def of_rank(comm: ThreadRank) -> None:
        layout, q = tensors(comm, rows=32 if comm.rank == 0 else 31)
        context_parallel(calls.load_op("causal"), layout)(q, q, q)

    text = "causal: q: expected 32 rows in [B, H, rows, D], those of one of 2 ranks, got 31 in [1, 4, 31, 16]"
    assert refused(of_rank) == [f"causal: rank 1 raised ArgumentError: {text}", text]


def test_arguments_that_differ_between_ranks_are_found() -> None:
    def of_rank(comm: ThreadRank) -> None:
        layout, q = tensors(comm)
        call = context_parallel(calls.load_op("causal"), layout, check=True)
        call(q, q, q, scale=1.0)
        call(q, q, q, scale=1.0 + comm.rank)

    text = "causal: scale: expected the same on every rank, 1.0 as on rank 0, got 2.0 on rank 1"
    assert refused(of_rank) == [text, text]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"return_lse": "no"}, "ArgumentError: causal: return_lse: expected True or False, got 'no'"),
        ({"scale": torch.ones(2)}, "causal: scale: expected"),
        ({"q": torch.zeros(1, 4, 32, 16, device="meta")}, "causal: q: expected a strided tensor with values"),
        ({"k": torch.zeros(1, 4, 32, 16).to_sparse()}, "causal: k: expected a strided tensor with values, got one of"),
    ],
)
def test_whatever_one_rank_cannot_compute_is_told_to_all(keywords: dict[str, Any], text: str) -> None:
    def of_rank(comm: ThreadRank) -> None:
        layout, q = tensors(comm)
        call = context_parallel(calls.load_op("causal"), layout)
        call(**{"q": q, "k": q, "v": q, **(keywords if comm.rank == 1 else {})})

    first, second = refused(of_rank)
    assert first.startswith("causal: rank 1 raised ")
    assert text in first
    assert text.removeprefix("ArgumentError: ") in second


def test_plans_that_differ_are_told_by_what_differs() -> None:
    def of_rank(comm: ThreadRank) -> None:
        op, q = calls.load_op("causal"), torch.zeros(32, 4, 16)
        ends = [0, 20 + comm.rank, 64]
        layout = plan(op, comm, seq=64, heads=(4, 4), head_dim=16, strategy="gather", cu_seqlens=ends)
        context_parallel(op, layout)(q, q, q)

    got = "(0, 20, 64) as on rank 0, got (0, 21, 64) on rank 1"
    text = f"causal: cu_seqlens of the layout: expected the same on every rank, {got}"
    assert refused(of_rank) == [text, text]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"q_offset": 3},
            "causal: q_offset: expected None over several ranks: the layout says where rows are, got int",
        ),
        ({"sink": 3}, "causal: sink: expected one of q, k, v, "),
        ({"layout": "sbhd"}, "causal: layout: expected 'bhsd' or 'bshd', got 'sbhd'"),
        ({"return_lse": "no"}, "causal: return_lse: expected True or False, got 'no'"),
        ({"scale": float("nan")}, "causal: scale: expected a finite number or None, got nan"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(keywords: dict[str, Any], text: str) -> None:
    def of_rank(comm: ThreadRank) -> None:
        layout, q = tensors(comm)
        try:
            context_parallel(calls.load_op("causal"), layout, check=False)(q, q, q, **keywords)
        finally:
            assert comm.calls == []

    assert all(message.startswith(text) for message in refused(of_rank))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"seed": None}, "seed: expected a seed over several ranks, the same on each, got None"),
        ({"seed": 1, "dropout_origin": (0, 0, 4, 0, 32)}, "dropout_origin: expected None or (batch row, head, heads)"),
    ],
)
def test_dropout_that_ranks_cannot_agree_on_is_refused(keywords: dict[str, Any], text: str) -> None:
    def dropped(comm: ThreadRank) -> None:
        op = calls.load_op("causal_dropout")
        layout = plan(op, comm, seq=64, heads=(4, 4), head_dim=16, strategy="ring")
        q = torch.zeros(1, 4, 32, 16)
        context_parallel(op, layout)(q, q, q, dropout_p=0.5, **keywords)

    assert all(message.startswith(f"causal_dropout: {text}") for message in refused(dropped))


def test_pruning_over_ranks_is_refused() -> None:
    def pruned(comm: ThreadRank) -> None:
        op = calls.load_op("forgetting")
        layout = plan(op, comm, seq=64, heads=(4, 4), head_dim=16)
        q = torch.zeros(1, 4, 32, 16)
        context_parallel(op, layout)(q, q, q, g=torch.zeros(1, 32, 4), prune=0.1)

    assert all(message.startswith("forgetting: prune: expected None over several ranks") for message in refused(pruned))


def test_heads_that_do_not_split_are_refused() -> None:
    def unsplit(comm: ThreadRank) -> None:
        plan(calls.load_op("causal"), comm, seq=64, heads=(6, 2), head_dim=16, strategy="heads")

    text = "plan: strategy: expected 'gather' or 'auto', as heads cannot be split"
    assert all(message.startswith(text) for message in refused(unsplit, 4))
