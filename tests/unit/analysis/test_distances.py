"""Expressions that depend on positions only through their distance, and gradients that are sums by distance."""

from __future__ import annotations

import pytest

from codegen.analysis.call_modes import Mode, specialised
from codegen.analysis.distances import Lags, added_by_distance, kept_lags
from codegen.analysis.gradients import GradientKind, deterministic_modes, gradient_terms
from codegen.load.spec_file import load_text
from codegen.spec.model import Variant

SPEC = """
variants:
  v:
    mask: "{mask}"
    score: "{score}"
    tensors:
      bias: {{dims: [h, n], grad: true}}
      {reach}
    {more}
"""
BIAS = "score + bias[h, q_idx - kv_idx]"


def variant(mask: str = "causal", score: str = BIAS, more: str = "") -> Variant:
    reach = "reach: {dims: [h], dtype: int32}" if "reach" in mask else ""
    text = SPEC.format(mask=mask, score=score, reach=reach, more=more)
    return load_text(text, "spec.yaml").variants["v"]


def kinds(v: Variant, mode: Mode = Mode.DENSE) -> set[GradientKind]:
    return {term.kind for term in gradient_terms(specialised(v, mode), mode)}


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        ("causal", BIAS),
        ("window(60)", BIAS),
        ("kv_idx < q_idx + 7 and (q_idx - kv_idx) % 3 != 1", BIAS),
        ("q_idx - kv_idx < reach[h]", BIAS),
        ("causal", "score - bias[h, min(abs(q_idx - kv_idx) // 8, 3)]"),
        ("causal", f"where(h == 0, {BIAS}, {BIAS} + 0.5)"),
        ("causal", "score + bias[h, 2 * kv_idx - 2 * q_idx + 9] + bias[h, q_idx - kv_idx]"),
    ],
)
def test_sums_by_distance(mask: str, score: str) -> None:
    v = variant(mask, score)
    assert added_by_distance(v) is not None
    assert kinds(v) == {GradientKind.DISTANCE}
    assert Mode.DENSE in deterministic_modes(v)


@pytest.mark.parametrize(
    ("mask", "score", "more"),
    [
        ("causal and kv_idx != 3", BIAS, ""),
        ("q_idx + kv_idx > 9", BIAS, ""),
        ("causal", f"tanh({BIAS})", ""),
        ("causal", "score * bias[h, q_idx - kv_idx]", ""),
        ("causal", "score + 0.5 * bias[h, q_idx - kv_idx]", ""),
        ("causal", f"{BIAS} + kv_idx * 0.1", ""),
        ("causal", f"{BIAS} + floor(score)", ""),
        ("causal", f"{BIAS} + where(score > 0.2, 1.0, 0.0)", ""),
        ("causal", BIAS, "dropout: true"),
        ("causal", BIAS, "decay: true"),
    ],
)
def test_other_diagonals_keep_atomics(mask: str, score: str, more: str) -> None:
    v = variant(mask, score, more)
    assert GradientKind.DISTANCE not in kinds(v)
    assert GradientKind.DIAGONAL in kinds(v)
    assert deterministic_modes(v) == []


@pytest.mark.parametrize("mode", [Mode.PACKED, Mode.SEGMENTED])
def test_other_modes_keep_atomics(mode: Mode) -> None:
    assert kinds(variant(), mode) == {GradientKind.DIAGONAL}


@pytest.mark.parametrize(
    ("mask", "lags"),
    [
        ("causal", Lags(least=0)),
        ("q_idx > kv_idx and kv_idx + 12 > q_idx", Lags(least=1, most=11)),
        ("q_idx - kv_idx < reach[h]", Lags()),
        ("causal or kv_idx < 4", Lags()),
        ("2 * q_idx >= kv_idx", Lags()),
        ("q_idx // 4 >= kv_idx // 4", Lags()),
    ],
)
def test_limits_of_distances(mask: str, lags: Lags) -> None:
    assert kept_lags(variant(mask).mask) == lags


def test_no_mask_has_no_limits() -> None:
    assert kept_lags(None) == Lags()
