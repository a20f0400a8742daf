"""The tests that run without `--full` cover everything that the left out tests of this folder cover."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.cases import VARIANTS
from tests.support.coverage import SHARED_AXES, Case, Variants
from tests.support.library_formulas import FORMULAS
from tests.support.paths import ROOT
from tests.support.selection import SELECTION, Selection

ALL = Selection(collected=(), selected=())
"""The selection of a session that leaves out no test: on a GPU, with `--full`, or with tests that are named."""

MODES = ("dense", "packed", "segmented")
FILES = {
    path.relative_to(ROOT).as_posix()
    for path in Path(__file__).parent.rglob("test_*.py")
    if path != Path(__file__) and "pytest.mark.covers(" in path.read_text("utf-8")
}


@pytest.fixture
def selection(request: pytest.FixtureRequest) -> Selection:
    return request.config.stash.get(SELECTION, ALL)


def pairs(cases: Iterable[Case]) -> set[object]:
    """Every value of every axis, and pairs of values: a variant with each mode, dtype, framework, family and direction,
    and a function and its parameters with all axes but the variant."""
    return {found for case in cases for found in _pairs(case)}


def _pairs(case: Case) -> Iterator[object]:
    axes = {"call": f"{case.file}::{case.function}", **case.axes}
    yield from axes.items()
    for a, b in itertools.combinations(axes.items(), 2):
        if "variant" not in (a[0], b[0]) or (case.variant in VARIANTS and {a[0], b[0]} <= {"variant", *SHARED_AXES}):
            yield a, b


def test_selection_covers_every_pair_of_the_product(selection: Selection) -> None:
    """(variant, mode), (variant, dtype), (variant, framework), (call, mode), (call, dtype) and all others."""
    assert not pairs(selection.collected) - pairs(selection.selected)


def test_selection_covers_every_trait_of_a_plan_with_every_function(selection: Selection) -> None:
    variants = Variants.of_repository()

    def traits(cases: Iterable[Case]) -> set[object]:
        own = [(c.function, variants.own[c.variant]) for c in cases if c.variant in variants.own]
        library = {(c.function, variants.library[c.variant]) for c in cases if c.variant in variants.library}
        return {(function, trait) for function, known in own for trait in known.traits()} | library

    assert not traits(selection.collected) - traits(selection.selected)


def test_selection_runs_every_variant_in_every_mode_and_family(selection: Selection) -> None:
    """Holds for the whole folder only: fewer files cannot cover all of it."""
    run = {(c.variant, c.axes.get("mode"), c.axes.get("family")) for c in selection.selected}
    wanted = {(v, mode, family) for v in VARIANTS for mode in MODES for family in ("portable", "hopper")}
    wanted |= {(name, "dense", "portable") for name in FORMULAS}
    if {case.file for case in selection.collected} == FILES:
        assert not wanted - run
