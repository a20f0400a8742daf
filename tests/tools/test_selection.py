"""Which tests of a product of parameters run by default: the greedy cover, plan classes, and the marker `covers`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from tests.support.coverage import Case, Variants, select

VARIANTS = Variants.of_repository()


def case(variant: str, function: str = "test_f", **parameters: str) -> Case:
    axes = {"mode": "dense", "variant": variant, **parameters}
    return Case(file="test_file.py", function=function, axes=axes, parameters=("variant", *parameters))


def all_pairs(case: Case) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return itertools.combinations(sorted(case.axes.items()), 2)


def test_select_covers_every_feature_with_few_cases() -> None:
    """Pairs of four axes of 3 values: 81 cases, of which 9 to 14 hold all pairs."""
    values = itertools.product("abc", repeat=4)
    cases = [Case(file="f", function="g", axes=dict(zip("wxyz", each, strict=True))) for each in values]
    chosen = select(cases, all_pairs)
    assert {pair for i in chosen for pair in all_pairs(cases[i])} == {p for each in cases for p in all_pairs(each)}
    assert 9 <= len(chosen) <= 14


def test_select_depends_on_the_cases_alone() -> None:
    cases = [case(v, call=c, dtype=d) for v in VARIANTS.own for c in "abcd" for d in ("float16", "float32")]
    first = select(cases, VARIANTS.features)
    assert first == select(list(cases), VARIANTS.features)
    assert first == sorted(set(first))


def test_select_keeps_a_case_with_a_feature_of_its_own() -> None:
    cases = [case(v, call=c) for v in VARIANTS.own for c in "abc"]
    lone = case("natten", function="test_lone")
    Random(1).shuffle(cases)
    assert len(cases) in select([*cases, lone], VARIANTS.features)


def test_features_hold_every_variant_with_every_dtype_of_a_file() -> None:
    cases = [case(v, call=c, dtype=d) for v in VARIANTS.own for c in "abc" for d in ("float16", "float32")]
    chosen = [cases[i] for i in select(cases, VARIANTS.features)]
    assert {(c.variant, c.axes["dtype"]) for c in chosen} == {(c.variant, c.axes["dtype"]) for c in cases}
    assert {(c.axes["call"], c.axes["dtype"]) for c in chosen} == set(itertools.product("abc", ("float16", "float32")))
    assert len(chosen) < len(cases)


def test_features_hold_a_variant_of_tables_with_every_call() -> None:
    cases = [case(v, call=c) for v in VARIANTS.own for c in "abcdefgh"]
    chosen = [cases[i] for i in select(cases, VARIANTS.features)]
    for call in "abcdefgh":
        traits = {trait for c in chosen if c.axes["call"] == call for trait in VARIANTS.own[c.variant].coarse_traits()}
        assert traits >= {"tables", "computed bounds", "own score"}


def test_features_hold_every_plan_class_of_the_library_with_every_function() -> None:
    cases = [case(name, function=function) for function in ("test_f", "test_g") for name in VARIANTS.library]
    chosen = [cases[i] for i in select(cases, VARIANTS.features)]
    for function in ("test_f", "test_g"):
        found = {VARIANTS.library[c.variant] for c in chosen if c.function == function}
        assert found == set(VARIANTS.library.values())
    assert len({c.variant for c in chosen}) < len(VARIANTS.library)


def test_features_hold_every_variant_of_the_library_in_portable_kernels() -> None:
    cases = [case(name, family="portable") for name in VARIANTS.library]
    assert len(select(cases, VARIANTS.features)) == len(VARIANTS.library)


def test_plan_classes_join_variants_that_differ_in_expressions_alone() -> None:
    classes = VARIANTS.library
    assert len(set(classes.values())) < len(classes)
    assert VARIANTS.own["causal"] != VARIANTS.own["window"]
    assert VARIANTS.own["document"].schedule == "ranges"
    assert "own gradients" in VARIANTS.own["forgetting"].traits()
