"""Context parallelism by a ring: dropout, numbers of packed sequences and of keys, beside what else a variant has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from codegen.testing import calls
from tests.ops.torch.test_parallel import PACKED_ROWS, ROWS, check, draw
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
  thirds: {mask: q_idx // 16 % 3 == kv_idx // 16 % 3, dropout: true}
  padded:
    mask: kv_idx < length[b]
    tensors: {length: {dims: [b], dtype: int32, example: 30 - 4 * b}}
    dropout: true
  log_n: {score: score * log(kv_len), dropout: true}
  share: {mask: abs(q_idx - kv_idx) < kv_len // 3}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package of SPEC."""
    with importable(tmp_path_factory.mktemp("ring") / "tests", "ring_variants", SPEC) as package:
        yield package.name


VARIANTS = ("key_bias", "fading", "thirds", "padded", "log_n", "share")


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


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("variant", ["log_n", "share"])
def test_batch_rows_have_keys_of_their_own_number(package: str, variant: str, balance: str) -> None:
    inputs = draw(variant, seq=70, package=package)
    lengths = torch.tensor([70, 31], dtype=torch.int32)
    ids = torch.where(torch.arange(70) < lengths[:, None], 0, -1).to(torch.int32)
    check(
        variant,
        inputs,
        ROWS,
        ranks=2,
        plan_options={"strategy": "ring", "balance": balance},
        options={"kv_lengths": lengths},
        of_reference={"q_segment_ids": torch.zeros_like(ids), "kv_segment_ids": ids},
        package=package,
    )
