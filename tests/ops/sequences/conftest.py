"""A package of variants of kinds that the library does not have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rendering import importable

# The library does not have these: the dims `b`, `q_idx` and `kv_idx` at every place, and `b` as a number.
SPEC = """
variants:
  per_pair:
    mask: seen[b, q_idx, kv_idx] or kv_idx == b
    score: score + bias[b, h, q_idx, kv_idx] + far[h, q_idx - kv_idx]
    tensors:
      seen: {dims: [b, q_idx, kv_idx], dtype: bool}
      bias: {dims: [b, h, q_idx, kv_idx], grad: true}
      far: {dims: [h, 9], grad: true}
  per_row:
    mask: kv_idx < length[b] + q_idx
    score: score * key[kv_idx, b] + query[q_idx] + gain[b, h] * table[b // 2] + query[kv_idx + 2] + 0.1 * b
    tensors:
      length: {dims: [b], dtype: int32}
      key: {dims: [kv_idx, b], grad: true}
      query: {dims: [q_idx], grad: true}
      gain: {dims: [b, h], grad: true}
      table: {dims: [n], grad: true}
  mapped:
    mask: group[b, order[q_idx]] <= group[b, kv_idx // 2]
    score: score + place[q_idx] - place[kv_idx]
    tensors:
      group: {dims: [b, kv_idx], dtype: int32}
      order: {dims: [n], dtype: int32}
      place: {dims: [n], grad: true}
  tabled:
    mask: order[q_idx] >= order[kv_idx]
    score: score + place[q_idx] - place[kv_idx]
    tensors: {order: {dims: [n], dtype: int32}, place: {dims: [n], grad: true}}
  everything: {mask: causal and window(5), score: softcap(20.0), sink: true, decay: true, dropout: true}
"""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A package of the variants above."""
    with importable(tmp_path_factory.mktemp("sequences"), "sequence_variants", SPEC) as package:
        yield package.name
