"""Which variants can be pruned, and the companion variant that each of them gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.analysis.schedule import Schedule, analyse
from codegen.load.spec_file import load
from codegen.spec.model import Variant
from codegen.util.errors import SpecError

TENSORS = "tensors: {doc: {dims: [b, kv_idx], dtype: int32}}"


def read(tmp_path: Path, entry: str) -> dict[str, Variant]:
    path = tmp_path / "variants.yaml"
    path.write_text(f"variants:\n  own: {{{entry}}}\n", encoding="utf-8")
    return dict(load(path).variants)


@pytest.mark.parametrize(
    "mask",
    [
        "",
        "mask: causal",
        "mask: causal and q_idx - kv_idx < 64",
        "mask: causal and window(size), scalars: {size: {type: int, min: 1}}",
        "mask: causal and chunk(64)",
        "mask: causal and document, " + TENSORS,
        "mask: causal or prefix(8)",
        "mask: symmetric_window(0)",
    ],
)
def test_masks_that_keep_each_query_s_own_key(tmp_path: Path, mask: str) -> None:
    found = read(tmp_path, f"{mask}{', ' if mask else ''}decay: true, prune: true")
    assert list(found) == ["own", "own_pruned"]
    assert found["own"].pruned == "own_pruned"
    companion = found["own_pruned"]
    assert not companion.pruned
    assert companion.decay
    assert companion.tensors["first_key"].dims == ("b", "h", "q_idx")
    analysis = analyse(companion.mask)
    assert analysis.tables_per_head
    if " or " not in mask:
        assert analysis.schedule is Schedule.RANGES
    written = read(tmp_path, companion.entry.partition(": ")[2].removeprefix("{").removesuffix("}"))
    assert written["own"].mask == companion.mask


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("mask: causal, prune: true", "pruning follows from a log-decay: add 'decay: true'"),
        ("mask: causal, score: softcap(20), decay: true, prune: true", "without 'score'"),
        ("mask: causal, dropout: true, decay: true, prune: true", "without 'dropout'"),
        ("mask: q_idx > kv_idx, decay: true, prune: true", "the mask must keep it for every query"),
        ("mask: q_idx != kv_idx, decay: true, prune: true", "the mask must keep it for every query"),
        ("mask: causal and kv_idx < 99, decay: true, prune: true", "the mask must keep it for every query"),
        (
            "mask: causal and window(size), scalars: {size: int}, decay: true, prune: true",
            "the mask must keep it for every query",
        ),
        (
            "mask: 'causal and low[b] <= kv_idx', tensors: {low: {dims: [b], dtype: int32}}, decay: true, prune: true",
            "the mask must keep it for every query",
        ),
        (
            "mask: 'causal or first_key[b] < 1', tensors: {first_key: {dims: [b], dtype: int32}}, decay: true, "
            "prune: true",
            "needs the argument name 'first_key'",
        ),
        ("mask: causal, decay: true, prune: true}\n  own_pruned: {mask: causal", "needs the name 'own_pruned'"),
    ],
)
def test_entries_that_cannot_be_pruned(tmp_path: Path, entry: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, entry)
    assert "variants.own.prune: " in str(caught.value)
    assert problem in str(caught.value)
