"""The functions that `register` registers, in versions of transformers inside and outside of the tested range."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated.integrations import transformers as hf  # noqa: E402


def registered(name: str) -> object:
    return transformers.AttentionInterface()[name]


def test_register_serves_continuous_batching_too() -> None:
    hf.register("both")
    assert "paged|both" in transformers.AttentionInterface().valid_keys()
    first = registered("paged|both")
    hf.register("both")
    assert registered("paged|both") is first


def test_an_untested_transformers_trains_and_refuses_continuous_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    hf.register("of_six")
    refused = registered("paged|of_six")
    assert callable(refused)
    with pytest.raises(ImportError, match=r"transformers 6\.1\.0: continuous batching was tested with 5\.17"):
        refused(None)
