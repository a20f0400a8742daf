"""Segmented calls whose segments are runs: the launches that they import from those of packed calls exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from codegen.analysis.call_modes import Mode
from codegen.load.spec_file import load
from codegen.plan.variant import plan
from tests.support.rendering import importable

# Scores that are sums of terms of the query and of the key: the packed backward adds the former to lse by position.
SPEC = """
variants:
  by_slope: {mask: causal, score: alibi, tensors: {slope: {dims: [h]}}}
  by_exponent: {mask: causal, score: score - exp2(-h) * (q_idx - kv_idx)}
  by_distance: {mask: causal, score: score - 0.1 * (q_idx - kv_idx) ** 2}
  capped: {mask: causal, score: softcap(30.0)}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def test_segmented_backward_leaves_runs_that_the_packed_one_computes(spec: Path) -> None:
    variants = load(spec).variants
    packed = {name: plan(variant, Mode.PACKED).differentiates_runs for name, variant in variants.items()}
    segmented = {name: plan(variant, Mode.SEGMENTED) for name, variant in variants.items()}
    assert {name: found.hopper_bwd.leaves_runs for name, found in segmented.items()} == packed
    assert {name: found.dq.leaves_runs for name, found in segmented.items()} == packed
    assert packed["capped"]
    assert not packed["by_slope"]


def test_launches_of_segmented_calls_import(tmp_path: Path) -> None:
    with importable(tmp_path, "runs_of_terms", SPEC):
        for name in ("by_slope", "by_exponent", "by_distance", "capped"):
            importlib.import_module(f"runs_of_terms.{name}.segmented.launch")
