"""Context parallelism with ids and positions whose order is not that of the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan
from tests.ops.torch.test_parallel import BATCH, DIM, HEADS, ROWS, STRATEGIES, check, draw, refused
from tests.support.ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

SEQ = 44


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_positions_may_come_in_any_order(strategy: str) -> None:
    """A row attends to keys of later rows if their positions are earlier. `band_bias` reads a tensor by query row."""
    rows = torch.arange(SEQ, dtype=torch.int32)
    for positions in (rows.flip(0), rows % 15):
        tokens = {"q_positions": positions.expand(BATCH, -1).contiguous()}
        for variant in ("causal", "band_bias"):
            check(variant, draw(variant, seq=SEQ), ROWS, ranks=2, plan_options={"strategy": strategy}, tokens=tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_of_the_plan_may_be_interrupted(strategy: str) -> None:
    ids = torch.tensor([0] * 6 + [1] * 20 + [0] * 8 + [2] * 9 + [1], dtype=torch.int32)
    options = {"strategy": strategy, "segment_ids": ids, "balance": "contiguous"}
    reference = {"q_segment_ids": ids.expand(BATCH, -1).contiguous()}
    check("causal", draw("causal", seq=SEQ), ROWS, ranks=4, plan_options=options, of_reference=reference)


def test_the_pairs_of_a_ranks_own_rows_alone_are_refused() -> None:
    op, inputs = calls.load_op("band_bias"), draw("band_bias", seq=SEQ)

    def of_rank(comm: ThreadRank) -> None:
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather", balance="zigzag")
        q, k, v = (layout.shard(x.detach(), 2) for x in (inputs.q, inputs.k, inputs.v))
        bias = layout.shard(layout.shard(inputs.tensors["bias"].detach(), 2), 3)
        context_parallel(op, layout)(q, k, v, bias=bias, **inputs.scalars)

    text = "band_bias: bias: expected one axis of 32 rows, those of one rank, and 44 in the others, got [2, 8, 32, 32]"
    assert refused(of_rank) == [text, text]


def test_ids_and_positions_are_those_of_a_ranks_rows() -> None:
    """Whole ones would be taken for those of the first rows of each rank."""
    op, q = calls.load_op("causal"), torch.zeros(BATCH, 4, SEQ // 2, DIM)

    def of_rank(comm: ThreadRank, name: str) -> None:
        layout = plan(op, comm, seq=SEQ, heads=(4, 4), head_dim=DIM, strategy="gather", balance="contiguous")
        context_parallel(op, layout)(q, q, q, **{name: torch.zeros(BATCH, SEQ, dtype=torch.int32)})

    for name in ("q_segment_ids", "q_positions"):
        text = f"causal: {name}: expected a tensor [2, 22], an element for each of this rank's rows, got Tensor [2, 44]"
        assert refused(partial(of_rank, name=name)) == [text, text]


def test_batch_rows_are_as_many_as_those_of_the_segment_ids() -> None:
    op, q = calls.load_op("causal"), torch.zeros(BATCH, 4, SEQ // 2, DIM)

    def of_rank(comm: ThreadRank) -> None:
        options: dict[str, Any] = {
            "strategy": "gather",
            "balance": "contiguous",
            "segment_ids": torch.zeros(3, SEQ, dtype=torch.int32),
        }
        context_parallel(op, plan(op, comm, seq=SEQ, heads=(4, 4), head_dim=DIM, **options))(q, q, q)

    text = "causal: q: expected 3 batch rows, as the segment_ids of the layout have, got 2"
    assert refused(of_rank) == [text, text]


def test_numbers_in_tensors_that_differ_between_ranks_are_found() -> None:
    """A scalar of the variant may be a tensor without dims: its value is compared, not its shape."""

    op = calls.load_op("window")

    def of_rank(comm: ThreadRank) -> str:
        layout = plan(op, comm, seq=64, heads=(4, 4), head_dim=DIM, strategy="gather", size=20)
        call, q = context_parallel(op, layout, check=True), torch.zeros(1, 4, 32, DIM)
        call(q, q, q, size=torch.tensor(20))
        with pytest.raises(ValueError, match="window: size: ") as raised:
            call(q, q, q, size=torch.tensor(20 + comm.rank))
        return str(raised.value)

    text = "window: size: expected the same on every rank, 20 as on rank 0, got 21 on rank 1"
    assert run_ranks(2, of_rank) == [text, text]
