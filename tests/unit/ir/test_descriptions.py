"""Every word of the expression language has a description, and every description is of a word."""

from __future__ import annotations

import pytest

from codegen.ir import descriptions, expr
from codegen.ir.expr import Type, Var, float_var, int_var
from codegen.ir.language import (
    BINARY_OPERATORS,
    BIT_OPERATORS,
    COMPARISON_OPERATORS,
    FUNCTIONS,
    INFINITY,
    SHIFT_OPERATORS,
)
from codegen.ir.parse import Scope, parse


def test_every_name_is_described() -> None:
    assert set(descriptions.NAMES) == {*expr.INDEX_NAMES, *expr.LENGTH_NAMES, expr.SCORE, INFINITY, "True", "False"}


def test_every_function_is_described() -> None:
    assert set(descriptions.FUNCTIONS) == {*FUNCTIONS, "where"}


def test_every_operator_is_described_and_has_a_precedence() -> None:
    tables = (BINARY_OPERATORS, COMPARISON_OPERATORS, BIT_OPERATORS, SHIFT_OPERATORS)
    symbols = {str(entry[0]) for table in tables for entry in table.values()}
    assert set(descriptions.OPERATORS) == {*symbols, "**", "~", "in", "not in", "and", "or", "not"}
    ranked = {word for level in descriptions.PRECEDENCE for word in level}
    assert set(descriptions.OPERATORS) <= ranked


@pytest.mark.parametrize("name", descriptions.FUNCTIONS)
def test_signature_of_a_function_parses(name: str) -> None:
    call = descriptions.FUNCTIONS[name][0]
    assert call.startswith(f"{name}(")
    bound = {each: float_var(each) for each in ("x", "y", "low", "high")}
    scope = Scope(bound={**bound, "condition": Var(Type.BOOL, "condition")})
    assert parse(call.replace(", ...", ""), scope, Type.INT if name == "int" else Type.FLOAT)


@pytest.mark.parametrize(
    ("tight", "loose"), [("**", "*"), ("*", "+"), ("+", "<<"), ("<<", "&"), ("&", "^"), ("^", "|")]
)
def test_precedence_is_the_parsers(tight: str, loose: str) -> None:
    ranks = {word: i for i, level in enumerate(descriptions.PRECEDENCE) for word in level}
    assert ranks[tight] < ranks[loose]
    scope = Scope(bound={name: int_var(name) for name in ("x", "y")})
    assert parse(f"x {loose} y {tight} 2", scope, Type.INT) == parse(f"x {loose} (y {tight} 2)", scope, Type.INT)
