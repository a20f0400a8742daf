"""Leaves out tests of a product of parameters whose pairs other tests cover, by the rules of `coverage`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.support.coverage import SHARED_AXES, VARIANT, Case, Variants, select
from tests.support.paths import ROOT

MARKER = "covers"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cases of a session that take part in selection: all of them, and those that run."""

    collected: tuple[Case, ...]
    selected: tuple[Case, ...]


SELECTION = pytest.StashKey[Selection]()


def case_of(item: pytest.Item) -> Case | None:
    """The case that a test covers, or None for a test without the marker, which always runs.

    `variant="name"` in a marker: the parameter `name` holds the variant.
    """
    # The closest marker comes first: a function's marker overrides that of its file.
    given: dict[str, str] = {}
    for marker in item.iter_markers(MARKER):
        given = {**marker.kwargs, **given}
    if item.get_closest_marker(MARKER) is None:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    alias = given.get(VARIANT, VARIANT)
    own = {VARIANT if name == alias else name: _text(value) for name, value in parameters.items()}
    axes = {name: given[name] for name in SHARED_AXES if name in given} | own
    return Case(
        file=item.path.relative_to(ROOT).as_posix(),
        function=item.nodeid.split("::")[-1].split("[")[0],
        axes=axes,
        parameters=tuple(own),
    )


def _text(value: object) -> str:
    """A value as text. Within a process, equal values have equal texts."""
    return str(value).removeprefix("torch.")


def choose(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item], Selection]:
    """Tests that run, tests that do not, and the cases of both. The tests that run cover each file separately."""
    variants = Variants.of_repository()
    cases = {item: case for item in items if (case := case_of(item)) is not None}
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item, case in cases.items():
        by_file[case.file].append(item)
    run = {item for item in items if item not in cases}
    for group in by_file.values():
        run |= {group[i] for i in select([cases[item] for item in group], variants.features)}
    selection = Selection(
        collected=tuple(cases.values()), selected=tuple(case for item, case in cases.items() if item in run)
    )
    return [x for x in items if x in run], [x for x in items if x not in run], selection
