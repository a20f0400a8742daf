"""A score of -inf leaves a pair out as a mask does; any other infinity of a score is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.load.spec_file import load
from codegen.spec.model import Variant
from codegen.util.errors import SpecError


def read(folder: Path, **entry: str) -> Variant:
    lines = "".join(f"    {key}: {text!r}\n" for key, text in entry.items())
    path = folder / "spec.yaml"
    path.write_text(f"variants:\n  one:\n{lines}    tensors: {{t: {{dims: [h]}}}}\n", encoding="utf-8")
    return load(path).variants["one"]


@pytest.mark.parametrize(
    ("score", "keep", "value"),
    [
        ("where(q_idx >= kv_idx, t[h] * score, -inf)", "q_idx >= kv_idx", "t[h] * score"),
        ("-inf if kv_idx < 4 else score + t[h]", "kv_idx >= 4", "score + t[h]"),
        ("score + t[h] + where(causal, 0, -inf)", "causal", "score + t[h]"),
        ("t[h] + score - where(causal, 0.0, inf)", "causal", "t[h] + score"),
        ("2 * where(causal, score, -inf) * 3 + t[h]", "causal", "6 * score + t[h]"),
        ("t[h] - (-score - where(causal, 1, -inf))", "causal", "t[h] + (score + 1)"),
        (
            "where(kv_idx < 3, score * t[h], where(causal, score, -inf))",
            "kv_idx < 3 or (kv_idx >= 3 and causal)",
            "where(kv_idx < 3, score * t[h], score)",
        ),
    ],
)
def test_minus_infinity_is_a_part_of_the_mask(tmp_path: Path, score: str, keep: str, value: str) -> None:
    got, want = read(tmp_path, score=score), read(tmp_path, mask=keep, score=value)
    assert (got.mask, got.score) == (want.mask, want.score)


def test_it_joins_the_mask_that_is_there(tmp_path: Path) -> None:
    got = read(tmp_path, mask="causal", score="where(kv_idx % 4 == 0, t[h] * score, -inf)")
    want = read(tmp_path, mask="causal and kv_idx % 4 == 0", score="t[h] * score")
    assert (got.mask, got.score) == (want.mask, want.score)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("where(causal, t[h] * score, inf)", "a score cannot be +inf: its softmax is no number"),
        (
            "where(score > t[h], score, -inf)",
            "a condition on 'score' cannot choose -inf; choose a number such as -1e30",
        ),
        ("max(where(causal, t[h] * score, -inf), -9)", "inf can only be what a score leaves a pair out by"),
        ("t[h] * where(causal, score, -inf)", "inf can only be what a score leaves a pair out by"),
        ("t[h] - inf", "no query attends to any key: the mask or -inf leaves out every pair"),
        ("-inf", "no query attends to any key: '-inf' is -inf"),
    ],
)
def test_another_infinity_is_an_error(tmp_path: Path, score: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, score=score)
    assert message in str(caught.value)
