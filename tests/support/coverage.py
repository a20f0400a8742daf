"""Which tests of a product of variants and calls run by default: enough to cover every pair that may interact.

A test of every variant with every call, dtype and framework repeats most of what it covers. What a kernel does with a
call follows from the variant's plan: how it finds its blocks, whether its score is the scaled product, which gradients
of its own tensors it computes. So of a product of parameters these run:

- every value of every parameter, and every pair of values of two parameters other than the variant;
- every value with a variant of computed block bounds, one of block tables, and one with a score of its own;
- every test function with every trait of `PlanClass.traits`;
- in each file every variant, and every variant with each dtype, mode and framework that the file has for it;
- of the variants of library.yaml every one in the portable kernels, and in other tests one of each plan class;
- of the variants that a test file defines every one in every test function.

`pytest --full` (`make test-all`, on a GPU `make test-gpu ARGS=--full`) runs the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from codegen.analysis.call_modes import Mode
from codegen.analysis.ranges import Range, Union
from codegen.analysis.schedule import Schedule
from codegen.load.spec_file import load
from codegen.plan.variant import VariantPlan, plan
from codegen.util.cover import cover
from tests.support.paths import DEFAULT_SPEC, LIBRARY

Feature = Hashable

VARIANT = "variant"
SHARED_AXES = ("mode", "dtype", "framework", "family", "direction")
"""Axes that a test function may leave to its file; every pair of one of these and a variant is covered in each file."""

TABLES = frozenset({Schedule.RANGES, Schedule.LISTS})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test: its file, its function, and the value of each axis; `parameters` are the axes of its own."""

    file: str
    function: str
    axes: Mapping[str, str]
    parameters: tuple[str, ...] = ()

    @property
    def variant(self) -> str:
        return self.axes.get(VARIANT, "")


# -------------------------------------------------------------------------------------------------------- plan classes


@dataclass(frozen=True, kw_only=True)
class PlanClass:
    """The properties that decide which parts of the templates a variant's kernels consist of. Kernels of variants of
    one class differ only in expressions."""

    schedule: Schedule
    tables_per_head: bool
    key_bounds: str
    query_bounds: str
    linear: bool
    separate_terms: tuple[str, ...]
    score_has_derivative: bool
    gradients: tuple[str, ...]
    helpers: tuple[str, ...]
    sink: bool
    decay: bool
    dropout: bool

    def traits(self) -> tuple[str, ...]:
        """The properties that decide how a call may affect a kernel, as words."""
        found = [f"schedule {self.schedule}"]
        found += ["own score"] * (not self.linear or self.sink)
        found += ["own gradients"] * bool(self.gradients or self.sink)
        return tuple(found)

    def coarse_traits(self) -> tuple[str, ...]:
        """The traits that are tested together with every value of every other parameter."""
        bounds = "tables" if self.schedule in TABLES else "computed bounds"
        return (bounds, "own score") if not self.linear or self.sink else (bounds,)


def plan_class(planned: VariantPlan) -> PlanClass:
    """The class of a variant in one mode."""
    variant, analysis = planned.variant, planned.analysis
    kernels = (planned.fwd, planned.dq, planned.dkdv)
    hopper = (planned.hopper_fwd, planned.hopper_bwd)
    terms = ("row_term", "key_term", "block_term")
    return PlanClass(
        schedule=analysis.schedule,
        tables_per_head=analysis.tables_per_head,
        key_bounds=_bounds(analysis.keys),
        query_bounds=_bounds(analysis.queries),
        linear=planned.fwd.linear,
        separate_terms=tuple(name for name in terms if any(getattr(kernel, name) for kernel in hopper)),
        score_has_derivative=planned.dq.full is not None and bool(planned.dq.full.dscore),
        gradients=tuple(sorted({f"{term.kind}{' sum' if term.is_sum else ''}" for term in planned.terms})),
        helpers=tuple(sorted(frozenset[str]().union(*(kernel.helpers for kernel in kernels)))),
        sink=variant.sink,
        decay=variant.decay,
        dropout=variant.dropout,
    )


def _bounds(union: Union) -> str:
    """Which bounds each range of a union has, one digit for each bound; `1111+0101` has two ranges."""
    ranges: list[Range] = [union.main] if union.other is None else [union.main, union.other]
    bounds = [(x.first, x.end, x.full_first, x.full_end) for x in ranges]
    return "+".join("".join("01"[e is not None] for e in each) for each in bounds)


@cache
def plan_classes(path: Path) -> dict[str, PlanClass]:
    """Variant -> its class in dense calls, of a spec file."""
    return {name: plan_class(plan(variant, Mode.DENSE)) for name, variant in load(path).variants.items()}


# ------------------------------------------------------------------------------------------------------ what is covered


@dataclass(frozen=True, kw_only=True)
class Variants:
    """The plan classes of the checked-in variants, and of the library's variants, which are covered only by class."""

    own: Mapping[str, PlanClass]
    library: Mapping[str, PlanClass]

    @staticmethod
    def of_repository() -> Variants:
        return Variants(own=plan_classes(DEFAULT_SPEC), library=plan_classes(LIBRARY))

    def features(self, case: Case) -> Iterator[Feature]:
        """Everything that a test covers: the items of the module's list."""
        others = [(name, case.axes[name]) for name in case.parameters if name != VARIANT]
        function = (case.file, case.function)
        yield function
        yield from ((function, other) for other in others)
        yield from ((function, pair) for pair in itertools.combinations(others, 2))
        if case.variant in self.own:
            known = self.own[case.variant]
            shared = [(name, case.axes[name]) for name in SHARED_AXES if name in case.axes]
            yield case.file, case.variant
            yield from ((case.file, case.variant, axis) for axis in shared)
            yield from ((function, trait) for trait in known.traits())
            yield from ((function, other, trait) for other in others for trait in known.coarse_traits())
        elif case.variant in self.library:
            yield function, self.library[case.variant]
            if case.axes.get("family") == "portable":
                yield function, case.variant
        elif case.variant:  # of a package of the file's own
            yield function, case.variant


def select(cases: Sequence[Case], features: Callable[[Case], Iterator[Feature]]) -> list[int]:
    """The positions of cases that together have every feature that any of them has, spread over the variants."""
    return cover([frozenset(features(case)) for case in cases], [case.variant for case in cases])
