"""Separate tuned files, and contenders whose times a test sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen.tune import families as families_module
from generated._runtime.core import configs, tuned
from tests.support.family_races import MadeUpBench
from tests.support.inline_pool import InlinePool


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tuned files, which the package reads and the tuner writes."""

    def path_of(gpu: str, variant: str, _package: Path | None = None) -> Path:
        return tmp_path / "tuned" / gpu / f"{variant}.json"

    def forget() -> None:
        tuned.tuned_entries.cache_clear()
        configs.tiles_for.cache_clear()

    monkeypatch.setattr(tuned, "tuned_path", path_of)
    forget()
    yield tmp_path / "tuned" / "imaginary_1"
    forget()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpBench]:
    class Bench(MadeUpBench):
        MS = staticmethod(lambda name, _: {"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 0.8}[name])
        FAULTS = staticmethod(lambda _: "")

    Bench.checked, Bench.pool = [], InlinePool()
    monkeypatch.setattr(families_module, "FamilyBench", Bench)
    monkeypatch.setattr(families_module, "Compilers", lambda _jobs: Bench.pool)
    return Bench
