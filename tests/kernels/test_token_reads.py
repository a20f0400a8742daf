"""The kernels of variants that read tensors of tokens in unusual ways: packed, and with positions in any order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from codegen.testing.golden import load_op
from generated._runtime.core.sequences import ByRow
from generated._runtime.torch import sequences as torch_sequences
from generated._runtime.torch.sequences import Tokens
from tests.support.cases import INTERPRET
from tests.support.rendering import importable
from tests.support.token_reads import ASKED, ENTRIES, PACKINGS, SPEC, check_packed, check_positions, drawn

pytestmark = pytest.mark.skipif(not INTERPRET, reason="small calls on the CPU")


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with importable(tmp_path_factory.mktemp("token_reads"), "odd_kernels", SPEC):
        yield importlib.import_module("odd_kernels.torch")


@pytest.mark.parametrize("name", ENTRIES)
def test_packed_tokens_are_read_within_their_sequence(ops: Any, name: str) -> None:
    check_packed(name, getattr(ops, name), PACKINGS["mixed"])


@pytest.mark.parametrize("packing", sorted(PACKINGS.keys() - {"mixed"}))
@pytest.mark.parametrize("name", ["two_limits", "nested"])
def test_sequences_without_tokens_read_nothing(ops: Any, name: str, packing: str) -> None:
    check_packed(name, getattr(ops, name), PACKINGS[packing])


@pytest.mark.parametrize("name", ["nested", "free_dims", "one_limit", "heads_of_keys"])
def test_positions_in_any_order(ops: Any, name: str) -> None:
    """A dim of tokens is indexed by row, whatever expression reads it; every other dim is indexed by position."""
    positions = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    check_positions(name, getattr(ops, name), positions.int())


# ------------------------------------------------------------------------------- where a GPU would not tell the host


def unread(*_: object) -> bool:
    return False


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "".join(str(int(flag)) for flag in asked[:3]))
def test_disorder_is_marked_on_the_device(asked: ByRow) -> None:
    from generated._runtime.core.token_order import mark_disorder

    for seed in (0, 1):
        tokens = Tokens(**drawn(seed))
        assert tokens.q_positions is not None
        assert tokens.kv_positions is not None
        q_len, kv_len = tokens.q_positions.shape[1], tokens.kv_positions.shape[1]
        o, lse = torch.zeros(64, q_len, 2, 24).transpose(1, 2), torch.zeros(64, 2, q_len)
        ids = (*tokens.q_segment_ids.stride(), *tokens.kv_segment_ids.stride())
        strides = (*ids, tokens.q_positions.stride(0), tokens.kv_positions.stride(0), *o.stride()[:3])
        flags = {"IN_ORDER": asked.in_order, "IN_STEP": asked.in_step, "AS_ROWS": asked.as_rows}
        sizes = {"HEAD_DIM_V": 24, "BLOCK_DV": 32, "BLOCK": 16}
        mark_disorder[(64,)](*tokens, o, lse, *strides, q_len, kv_len, 2, -1, **flags, **sizes)
        wrong = torch_sequences.positions_break_rule(tokens, -1, asked)
        assert torch.equal(o.isnan(), wrong.view(-1, 1, 1, 1).expand_as(o))
        assert torch.equal(lse.isnan(), wrong.view(-1, 1, 1).expand_as(lse))


@pytest.mark.parametrize("variant", ["forgetting", "document", "causal_dropout"])
def test_positions_nobody_looks_at_give_nan_where_they_disagree(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are NaN too. A batch row in order gets the same results as without positions."""
    monkeypatch.setattr(torch_sequences, "values_are_checked", unread)
    own: dict[str, Any] = {"g": -torch.rand(2, 20, 2)} if variant == "forgetting" else {}
    own |= {"dropout_p": 0.4, "seed": 2} if variant == "causal_dropout" else {}
    own |= {"doc": torch.arange(20, dtype=torch.int32).expand(2, 20) // 7} if variant == "document" else {}
    rows = torch.arange(20, dtype=torch.int32)
    positions = torch.stack([rows.flip(0), rows])
    q, k, v = torch.randn(3, 2, 2, 20, 16, requires_grad=True)
    op: Any = load_op(variant)
    o, lse = op(q, k, v, **own, q_positions=positions, kv_positions=rows.expand(2, 20), return_lse=True)
    want, want_lse = op(q, k, v, **own, return_lse=True)
    (dq,) = torch.autograd.grad(o[0].sum(), q)
    assert o[0].isnan().all()
    assert lse[0].isnan().all()
    assert dq[0].isnan().all()
    assert torch.equal(o[1], want[1])
    assert torch.equal(lse[1], want_lse[1])
