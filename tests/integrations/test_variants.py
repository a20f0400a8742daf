"""Which variant of the package computes a call of another library."""

from __future__ import annotations

from typing import Any

import pytest

from generated.integrations.entries import Attention, entry
from generated.integrations.variants import NotRenderedError, find


@pytest.mark.parametrize(
    ("wanted", "name", "scalars"),
    [
        (Attention(), "full", {}),
        (Attention(after=0), "causal", {}),
        (Attention(before=7, after=0), "window", {"size": 8}),
        (Attention(before=7, after=7), "band", {"before": 7, "after": 7}),
        (Attention(before=4095, after=0, cap=50.0), "gemma2_local", {}),
        (Attention(before=4095, after=0, cap=30.0), "band_softcap", {"before": 4095, "after": 0, "cap": 30.0}),
        (Attention(after=0, cap=20.0), "softcap", {}),
        (Attention(before=127, after=0, sink=True), "gpt_oss", {}),
        (Attention(before=7, after=0, sink=True), "band_sink", {"before": 7, "after": 0}),
        (Attention(after=0, chunk=8), "chunked", {"size": 8}),
        (Attention(after=0, dropout=True), "causal_dropout", {}),
    ],
)
def test_variants_are_found_by_what_they_compute(wanted: Attention, name: str, scalars: dict[str, Any]) -> None:
    found = find(wanted)
    assert (found.name, found.scalars) == (name, scalars)


@pytest.mark.parametrize(
    "wanted",
    [
        Attention(dropout=True),
        Attention(before=7, after=3, cap=2.0, sink=True),
        Attention(before=7, after=0, chunk=4, bias=True),
        Attention(after=0, images=True, dropout=True),
    ],
)
def test_the_entry_of_an_error_is_one_that_serves(wanted: Attention, tmp_path: Any, monkeypatch: Any) -> None:
    import json

    from codegen.load.spec_file import load
    from codegen.render.manifest import manifest_entries
    from generated.integrations import variants

    with pytest.raises(NotRenderedError):
        find(wanted)
    (tmp_path / "spec.yaml").write_text(entry(wanted), encoding="utf-8")
    entries = manifest_entries(load(tmp_path / "spec.yaml"))
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"variants": entries}), encoding="utf-8")
    monkeypatch.setattr(variants, "__file__", str(tmp_path / "integrations" / "variants.py"))
    meanings = variants._meanings.__wrapped__()
    assert [variants._matched(meaning, wanted) is not None for meaning in meanings] == [True]


@pytest.mark.parametrize(
    ("mask", "sides"),
    [
        ("band(past, coming)", {"before": "past", "after": "coming"}),
        ("causal and q_idx - kv_idx < size", {"before": "size"}),
        ("causal and band(past, coming)", {"before": "past"}),
        ("symmetric_window(size)", {}),
        ("causal", {}),
    ],
)
def test_sides_are_scalars_that_a_call_may_move(mask: str, sides: dict[str, str]) -> None:
    """Not those that set two bounds, nor those beside a bound that is compiled in."""
    from generated.integrations import variants

    names = [name for name in ("past", "coming", "size") if name in mask]
    declared = {"mask": mask, "score": "", "sink": False, "dropout": False, "decay": False, "tensors": {}}
    meaning = variants._meaning("own", {**declared, "scalars": names})
    assert meaning is not None
    assert variants._sides(meaning) == sides
