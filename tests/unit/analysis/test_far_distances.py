"""The distance from which on a score reads the same elements."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.analysis.distances import LAG, by_lag
from codegen.analysis.far_distances import FarLags, SizeLimit, distance_loads, far_lags
from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load_text
from codegen.plan.kernels.far_blocks import host_limits
from codegen.spec.model import Variant

SPEC = """
scores:
  bucket(n): n if n < 16 else min(16 + int(log(n / 16) / log(8) * 16), 31)
variants:
  v:
    mask: "{mask}"
    score: "score + {added}"
    tensors:
      bias: {{dims: [h, n], grad: true}}
      {other}
"""
ALL = "kv_idx < q_idx + 1000000"


def variant(added: str, mask: str = ALL) -> Variant:
    others = {"of[": "of: {dims: [n], dtype: int32}", "shift[": "shift: {dims: [b], dtype: int32}"}
    other = next((text for name, text in others.items() if name in added), "")
    return load_text(SPEC.format(mask=mask, added=added, other=other), "spec.yaml").variants["v"]


@pytest.mark.parametrize(
    ("added", "least", "most"),
    [
        ("bias[h, bucket(max(q_idx - kv_idx, 0))]", 0, 113),
        ("bias[h, bucket(abs(q_idx - kv_idx))]", -113, 113),
        ("bias[h, min(abs(q_idx - kv_idx) // 8, 3)]", -24, 24),
        ("bias[h, clamp(q_idx - kv_idx + 5, 0, 10)]", -5, 5),
        ("bias[h, 7 if q_idx - kv_idx < -9 else 3 if kv_idx - q_idx <= -4 else q_idx - kv_idx]", -10, 4),
    ],
)
def test_limits_are_proven(added: str, least: int, most: int) -> None:
    v = variant(added)
    assert far_lags(v) == FarLags(first=(least,), last=(most,))
    (load,) = distance_loads(v)
    by_distance = by_lag(load)
    assert by_distance is not None
    for lags in (np.arange(least - 3000, least + 1), np.arange(most, most + 3000)):
        read = np.maximum(evaluate(by_distance.indices[1], {LAG.name: lags}, {}), 0)
        assert (read == read[0]).all()


@pytest.mark.parametrize(
    ("added", "first", "last"),
    [
        ("bias[h, q_idx - kv_idx]", "0", "bias.shape[1] - 1"),
        ("bias[h, q_idx - kv_idx + 3]", "-3", "bias.shape[1] - 4"),
        ("bias[h, q_idx - kv_idx - 3]", "3", "bias.shape[1] + 2"),
        ("bias[h, kv_idx - q_idx + 9]", "10 - bias.shape[1]", "9"),
        ("bias[h, 2 * q_idx - 2 * kv_idx + 1]", "-1", "-((2 - bias.shape[1]) // 2)"),
        ("bias[h, q_idx - kv_idx] + bias[h, kv_idx - q_idx]", "min(0, 1 - bias.shape[1])", "max(bias.shape[1] - 1, 0)"),
        ("bias[h, (q_idx - kv_idx) % 7]", "None", "None"),
        ("bias[h, q_idx - kv_idx + shift[b]]", "None", "None"),
        ("bias[h, of[q_idx - kv_idx]]", "None", "None"),
    ],
)
def test_the_host_finds_them(added: str, first: str, last: str) -> None:
    assert [limit.text for limit in host_limits(variant(added, mask="(q_idx - kv_idx) % 3 != 1"))] == [first, last]


def test_a_mask_limits_a_side() -> None:
    size = SizeLimit(tensor="bias", axis=1, factor=1, rest=0)
    causal = variant("bias[h, q_idx - kv_idx]", mask="q_idx >= kv_idx")
    assert far_lags(causal) == FarLags(first=(), last=(size,))
    assert [limit.text for limit in host_limits(causal)] == ["-1", "bias.shape[1] - 1"]
