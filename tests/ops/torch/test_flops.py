"""`FlopCounterMode` counts an op's products as it counts those of PyTorch's own attention: for all pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode

from codegen.testing.calls import load_op
from generated._runtime.core.settings import INTERPRET
from generated.torch_parallel import context_parallel, plan
from tests.support.ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels, for minutes")


def counted(call: Callable[[], Tensor]) -> tuple[int, int]:
    """The operations of a call, and those of its backward."""
    with FlopCounterMode(display=False) as counter:
        o = call()
        forward = counter.get_total_flops()
        if o.requires_grad:
            o.sum().backward()
    return forward, counter.get_total_flops() - forward


def products(pairs: int, dim: int, v_dim: int) -> tuple[int, int]:
    """The operations of a forward and of a backward with so many pairs in all heads."""
    return 2 * pairs * (dim + v_dim), 2 * pairs * (3 * dim + 2 * v_dim)


def tensors(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["causal", "gpt_oss", "forgetting", "causal_dropout"])
def test_dense(name: str, device: str) -> None:
    q, k, v = tensors((2, 4, 24, 16), (2, 2, 40, 16), (2, 2, 40, 32), device=device)
    own: dict[str, Any] = {
        "gpt_oss": {"sink": torch.zeros(4, device=device)},
        "forgetting": {"g": torch.zeros(2, 40, 4, device=device)},
        "causal_dropout": {"dropout_p": 0.1, "seed": 1},
    }
    found = counted(lambda: load_op(name)(q, k, v, **own.get(name, {})))
    assert found == products(2 * 4 * 24 * 40, 16, 32)


def test_as_for_pytorchs_own_attention() -> None:
    """Of which PyTorch counts no kernel of the CPU."""
    q, k, v = tensors(*[(2, 4, 24, 16)] * 3, device="meta")
    forward, _ = counted(lambda: sdpa(q, k, v))
    assert counted(lambda: load_op("causal")(q, k, v))[0] == forward


def test_segments_of_a_row_are_not_told_apart() -> None:
    q, k, v = tensors(*[(2, 4, 24, 16)] * 3)
    ids = torch.arange(24) // 8
    found = counted(
        lambda: load_op("causal")(q, k, v, q_segment_ids=ids.expand(2, -1), kv_segment_ids=ids.expand(2, -1))
    )
    assert found == products(2 * 4 * 24 * 24, 16, 16)


def test_packed_sequences_have_pairs_of_their_own() -> None:
    q, k, v = tensors(*[(40, 4, 16)] * 3)
    offsets = torch.tensor([0, 8, 8, 40], dtype=torch.int32)
    found = counted(lambda: load_op("causal")(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets))
    assert found == products(4 * (8 * 8 + 32 * 32), 16, 16)


def test_packed_sequences_without_values_count_as_equally_long() -> None:
    with FakeTensorMode():
        q, k, v = tensors(*[(40, 4, 16)] * 3)
        offsets = torch.zeros(5, dtype=torch.int32)
        found = counted(lambda: load_op("causal")(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets))
    assert found == products(4 * 4 * 10 * 10, 16, 16)


@pytest.mark.parametrize(("mode", "keys"), [(nullcontext, 9 + 32), (FakeTensorMode, 32 + 32)], ids=["real", "fake"])
def test_cached_keys(mode: Callable[[], Any], keys: int) -> None:
    """Those that each sequence has; if lengths have no values, as many as its pages hold."""
    with mode():
        q, k = torch.randn(2, 4, 3, 16), torch.randn(8, 8, 2, 16)
        table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([9, 32], dtype=torch.int32)
        found = counted(lambda: load_op("causal")(q, k, k, page_table=table, kv_lengths=lengths))
    assert found == (products(4 * 3 * keys, 16, 16)[0], 0)


def test_a_rank_counts_its_share() -> None:
    op, heads, dim, seq = load_op("causal"), (4, 2), 16, 48

    def share(comm: ThreadRank) -> tuple[int, int]:
        layout = plan(op, comm, seq=seq, heads=heads, head_dim=dim)
        q, k, v = tensors(*[(1, n, seq // 2, dim) for n in (*heads, heads[1])])
        return counted(lambda: context_parallel(op, layout)(q, k, v))

    assert run_ranks(2, share) == [products(heads[0] * seq * seq // 2, dim, dim)] * 2


def test_layers_of_a_model_have_counts_of_their_own() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            o: Tensor = load_op("causal")(x, x, x)
            return o

    model = torch.nn.Sequential(Layer(), Layer())
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 2, 8, 16))
    forward = products(2 * 8 * 8, 16, 16)[0]
    by_module = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    assert by_module == {
        "Global": 2 * forward,
        "Sequential": 2 * forward,
        "Sequential.0": forward,
        "Sequential.1": forward,
    }
