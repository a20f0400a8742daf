"""Context parallelism by a ring: dropout, numbers per packed sequence, numbers of keys, and a variant's features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan
from tests.ops.torch.test_parallel import DIM, HEADS, PACKED_ROWS, ROWS, check, draw
from tests.support.ranks import ThreadRank, run_ranks
from tests.support.rendering import importable

pytestmark = pytest.mark.covers(family="reference", framework="torch")

SPEC = """
variants:
  key_bias:
    mask: q_idx >= kv_idx
    score: score + bias[b, kv_idx]
    tensors: {bias: {dims: [b, kv_idx], grad: true}}
    dropout: true
  fading: {mask: q_idx >= kv_idx, decay: true, sink: true, dropout: true}
  sunk: {mask: q_idx >= kv_idx, sink: true, dropout: true}
  thirds: {mask: q_idx // 16 % 3 == kv_idx // 16 % 3, dropout: true}
  padded:
    mask: kv_idx < length[b]
    tensors: {length: {dims: [b], dtype: int32, example: 30 - 4 * b}}
    dropout: true
  log_n: {score: score * log(kv_len), dropout: true}
  share: {mask: abs(q_idx - kv_idx) < kv_len // 3}
  tail: {mask: kv_idx >= kv_len - 16, sink: true}
  log_decay: {mask: causal, score: score * log(kv_len), decay: true, dropout: true}
  sized: {score: "score + lag[h, q_idx - kv_idx + kv_len]", tensors: {lag: {dims: [h, 2 * kv_len]}}}
  aligned: {mask: q_idx + kv_len - q_len >= kv_idx}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package of SPEC."""
    with importable(tmp_path_factory.mktemp("ring") / "tests", "ring_variants", SPEC) as package:
        yield package.name


WITH_KEYS = ("log_n", "share", "tail", "log_decay")
"""Variants that compute with the number of keys."""

VARIANTS = ("key_bias", "fading", "sunk", "thirds", "padded", *WITH_KEYS)


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ring_drops_beside_what_else_a_variant_has(package: str, variant: str, balance: str) -> None:
    """Runs of rows and keys begin inside the blocks that dropout draws for."""
    inputs = draw(variant, seq=70, package=package)
    options = {"strategy": "ring", "balance": balance}
    check(variant, inputs, ROWS, ranks=2, plan_options=options, package=package)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_packed_sequences(package: str, variant: str, dropout_p: float) -> None:
    inputs = calls.packed(calls.load_manifest(package)[variant], draw(variant, seq=45, batch=3, package=package))
    if "dropout_p" in inputs.scalars:
        inputs.scalars["dropout_p"] = dropout_p
    ends = torch.arange(0, 136, 45, dtype=torch.int32)
    options = {"strategy": "ring", "cu_seqlens": ends}
    given = {"cu_seqlens_q": ends}
    check(variant, inputs, PACKED_ROWS, ranks=2, plan_options=options, of_reference=given, packed=True, package=package)


def test_a_sink_counts_once_where_a_document_leaves_the_packed_call(package: str) -> None:
    """With dropout the cut document is computed apart on the second rank, and the others in one packed call."""
    shared = draw("sunk", seq=60, package=package)
    packed = calls.packed(calls.load_manifest(package)["sunk"], shared)
    ends = torch.tensor([0, 6, 80, 90, 120], dtype=torch.int32)
    options, given = {"strategy": "ring", "cu_seqlens": ends}, {"cu_seqlens_q": ends}
    check("sunk", packed, PACKED_ROWS, ranks=2, plan_options=options, of_reference=given, packed=True, package=package)


def test_documents_need_no_length_of_the_longest(package: str) -> None:
    """Each document takes a dense call, in which `max_seqlen_q` would be an error."""
    op, ends = calls.load_op("log_n", package), torch.tensor([0, 10, 45], dtype=torch.int32)
    q, k, v = torch.randn(45, 8, DIM), torch.randn(45, 2, DIM), torch.randn(45, 2, DIM)

    def of_rank(comm: ThreadRank) -> torch.Tensor:
        layout = plan(op, comm, seq=45, heads=HEADS, head_dim=DIM, strategy="ring", cu_seqlens=ends)
        rows = [layout.shard(x) for x in (q, k, v)]
        return layout.unshard(context_parallel(op, layout)(*rows, max_seqlen_q=35))

    wanted = op(q, k, v, cu_seqlens_q=ends, max_seqlen_q=35)
    for found in run_ranks(2, of_rank):
        assert torch.allclose(found, wanted, atol=1e-5)


def check_lengths(package: str, variant: str, seq: int, lengths: list[int], plan_options: dict[str, str]) -> None:
    """Compare a call with `kv_lengths` to a reference in which keys from these lengths on have the id of padding."""
    inputs, ends = draw(variant, seq=seq, package=package), torch.tensor(lengths, dtype=torch.int32)
    ids = torch.where(torch.arange(seq) < ends[:, None], 0, -1).to(torch.int32)
    check(
        variant,
        inputs,
        ROWS,
        ranks=2,
        plan_options=plan_options,
        options={"kv_lengths": ends},
        of_reference={"q_segment_ids": torch.zeros_like(ids), "kv_segment_ids": ids},
        package=package,
    )


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("variant", ["log_n", "share", "tail"])
def test_batch_rows_have_keys_of_their_own_number(package: str, variant: str, balance: str) -> None:
    check_lengths(package, variant, 70, [70, 31], {"strategy": "ring", "balance": balance})


@pytest.mark.parametrize("strategy", ["exchange", "ring"])
def test_a_plan_does_not_know_the_keys_of_batch_rows(package: str, strategy: str) -> None:
    """The last 16 of all keys are on the second rank, but the last 16 of each batch row's keys are on the first one."""
    check_lengths(package, "tail", 600, [180, 150], {"strategy": strategy, "balance": "contiguous"})


def test_what_no_part_of_a_call_can_compute_is_refused(package: str) -> None:
    sizes: dict[str, Any] = {"seq": 64, "heads": (8, 2), "head_dim": 16}
    why = "'ring' with sized, which reads a tensor whose size follows from the number of keys"
    with pytest.raises(ValueError, match=f"plan: strategy: expected 'gather', 'exchange' or 'auto', got {why}"):
        plan(calls.load_op("sized", package), 2, strategy="ring", **sizes)
    op, why = (
        calls.load_op("aligned", package),
        "with aligned, which computes with the number of queries of the whole call",
    )
    for strategy in ("gather", "exchange", "ring"):
        with pytest.raises(ValueError, match=f"plan: strategy: expected 'heads', .*, got '{strategy}' {why}"):
            plan(op, 2, strategy=strategy, **sizes)
    with pytest.raises(ValueError, match=f"plan: strategy: expected 'heads', on a mesh of one dim, got '2d' {why}"):
        plan(op, (2, 2), **sizes)
    with pytest.raises(ValueError, match="plan: strategy: expected fewer ranks, as heads cannot be split, got 'heads'"):
        plan(op, 3, **sizes)
    assert plan(op, 2, **sizes).strategy == "heads"
    assert plan(op, 1, strategy="gather", **sizes).strategy == "gather"


def test_heads_compute_with_the_number_of_queries(package: str) -> None:
    check("aligned", draw("aligned", seq=70, package=package), ROWS, ranks=2, plan_options={}, package=package)


@pytest.mark.parametrize("computes_gradients", [True, False])
def test_a_tensor_without_a_gradient_is_refused_as_on_one_rank(package: str, computes_gradients: bool) -> None:
    """In the forward, before anything is sent; without gradients the call is computed."""
    op = calls.load_op("sized", package)

    def message(comm: ThreadRank) -> str:
        layout = plan(op, comm, seq=64, heads=(4, 4), head_dim=16, strategy="gather")
        q, lag = torch.zeros(1, 4, 32, 16), torch.zeros(4, 128, requires_grad=True)
        try:
            with torch.set_grad_enabled(computes_gradients):
                context_parallel(op, layout, check=False)(q, q, q, lag=lag)
        except ValueError as error:
            assert comm.calls == []
            return str(error)
        return "computed"

    text = "sized: lag: it requires grad, but variants.yaml declares it without a gradient: add"
    expected = text if computes_gradients else "computed"
    assert all(found.startswith(expected) for found in run_ranks(2, message))
