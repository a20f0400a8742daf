"""Whether a variant stays the same when all positions are shifted, and whether its mask keeps keys after a query."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.analysis.shifts import computes_runs_alone, computes_with_lengths, is_shift_invariant, looks_back
from codegen.load.spec_file import load
from tests.support.paths import ROOT

MOVE = {"prefix_lm", "padding", "streaming_llm", "natten", "chunked", "forgetting_pruned"}
"""Variants of `variants.yaml` that compare a position with a number, or count positions from the first one on."""

LOOK_AHEAD = {"full", "prefix_lm", "padding", "natten", "band", "band_softcap", "band_sink", "band_bias", "band_mask"}


RUN_ALONE = {"causal", "full", "window", "alibi", "softcap", "relative_bias", "gpt_oss", "gemma2_local"}
RUN_ALONE |= {"band", "band_sink", "band_softcap"}
"""Variants without a tensor by token, a log-decay or dropout, whose blocks have bounds in closed form."""


def test_which_variants_compute_a_run_like_a_sequence() -> None:
    variants = load(ROOT / "variants.yaml").variants
    assert {name for name, variant in variants.items() if computes_runs_alone(variant)} == RUN_ALONE


def test_the_variants_of_the_library() -> None:
    variants = load(ROOT / "variants.yaml").variants
    assert {name for name, variant in variants.items() if not is_shift_invariant(variant)} == MOVE
    assert {name for name, variant in variants.items() if not looks_back(variant)} == {*LOOK_AHEAD, "band_images"}
    assert not any(map(computes_with_lengths, variants.values()))


@pytest.mark.parametrize(
    ("mask", "score", "tensor", "moves", "back"),
    [
        ("q_idx - kv_idx >= 0 and q_idx - kv_idx < 9", "", "", False, True),
        ("kv_idx < q_idx", "score - 0.5 * (q_idx - kv_idx)", "", False, True),
        ("kv_idx < q_idx + 1", "", "", False, True),
        ("kv_idx <= q_idx + 1", "", "", False, False),
        ("q_idx // 4 >= kv_idx // 4", "", "", True, False),
        ("2 * q_idx - 2 * kv_idx > 0", "", "", False, False),
        ("causal", "score + x[h, q_idx]", "[h, q_idx]", False, True),
        ("causal", "score + x[h, q_idx - 1]", "[h, q_idx]", True, True),
        ("causal", "score + x[h, max(q_idx - kv_idx, 0)]", "[h, 8]", False, True),
        ("causal", "score + x[h, q_idx]", "[h, 8]", True, True),
        ("causal", "score * q_idx", "", True, True),
        ("causal or kv_idx < 4", "", "", True, False),
        ("q_idx - kv_idx < kv_len // 3", "score * log(kv_len)", "", False, False),
        ("kv_idx >= kv_len - 9", "", "", True, False),
    ],
)
def test_expressions(tmp_path: Path, mask: str, score: str, tensor: str, moves: bool, back: bool) -> None:
    lines = [f"    mask: {mask}", *([f'    score: "{score}"'] if score else [])]
    lines += [f"    tensors: {{x: {{dims: {tensor}}}}}"] if tensor else []
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  one:\n" + "\n".join(lines) + "\n", encoding="utf-8")
    variant = load(spec).variants["one"]
    assert is_shift_invariant(variant) is not moves
    assert looks_back(variant) is back


def test_lengths_are_found(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  one:\n    score: score * log(kv_len)\n", encoding="utf-8")
    variant = load(spec).variants["one"]
    assert computes_with_lengths(variant)
