"""A terminal of 80 columns, and variants that the package does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = """\
variants:
  odd:
    mask: tanh(w[h, kv_idx]) + q_idx >= kv_idx or not seen[hkv]
    tensors: {w: {dims: [h, kv_idx]}, seen: {dims: [hkv], dtype: bool}}
  readers:
    mask: >-
      x[h, kv_idx] + y[q_idx, b] + z[b] > w[b, q_idx, kv_idx] + x[h, q_idx - 1] + y[kv_idx + 1, b] - table[kv_idx, b]
    tensors:
      {x: {dims: [h, kv_idx], dtype: int32}, y: {dims: [q_idx, b], dtype: int32}, z: {dims: [b], dtype: int32},
       w: {dims: [b, q_idx, kv_idx], dtype: int32}, table: {dims: [rows, b], dtype: int32}}
  sunk: {mask: causal, sink: true, decay: true, score: score + bias, tensors: {bias: {dims: [], grad: true}}}
"""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    spec = tmp_path / "own.yaml"
    spec.write_text(OWN, encoding="utf-8")
    return spec
