"""Statements: what they define and read, which of them a name needs, and which are vectors or tiles."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.expr import Level
from codegen.plan.code import statements
from codegen.plan.code.dialects import TL
from codegen.plan.code.statements import (
    Assign,
    Comment,
    Statement,
    assign,
    defines,
    free,
    needed,
    uses,
    with_key_vector,
)
from codegen.plan.code.tree import Arange, Broadcast, Code, Infix, Literal, Name, builtin, call

NAMES = ("a", "b", "c", "d", "e")


def lines(*pairs: tuple[str, Code]) -> list[Assign]:
    return [assign(target, value) for target, value in pairs]


def test_uses_names_variables_arguments_and_constants_but_no_functions() -> None:
    code = call("load_pairs", Infix("+", Name("x_ptr"), builtin("maximum", Name("i"), Literal(0))), Name("PTX"))
    assert uses(code) == {"x_ptr", "i", "PTX"}
    assert statements.calls(code) == {"load_pairs", "maximum"}


def test_uses_takes_code_statements_nothing_and_lists_of_these() -> None:
    parts: list[Any] = [None, Name("a"), [assign("b", Name("c")), Comment("d = e")], (Name("f"),)]
    assert uses(*parts) == {"a", "c", "f"}


def test_an_arange_reads_its_size() -> None:
    assert uses(Arange("BLOCK_N")) == {"BLOCK_N"}


def test_needed_follows_definitions_backwards() -> None:
    found = needed(lines(("a", Name("x")), ("b", Name("y")), ("c", Name("a")), ("d", Name("b"))), {"c"})
    assert defines(found) == ["a", "c"]


def test_needed_keeps_every_definition_of_a_name_that_is_assigned_twice() -> None:
    found = needed(lines(("end", Name("x")), ("end", builtin("maximum", Name("end"), Literal(0)))), {"end"})
    assert len(found) == 2


def test_needed_keeps_a_statement_of_two_targets_for_one_of_them() -> None:
    both = Assign(targets=("a", "b"), values=(Name("x"), Name("y")), level=Level.UNIFORM)
    mixed: list[Assign | Comment] = [both, Comment("of nothing")]
    assert needed(mixed, {"b"}) == [both]


def test_free_is_what_a_body_takes_from_outside() -> None:
    assert free(lines(("a", Name("x")), ("b", Infix("*", Name("a"), Name("y"))))) == {"x", "y"}


def test_levels_tell_vectors_from_tiles() -> None:
    vector = assign("x_kv", Name("x"), level=Level.KEY)
    tile = assign("y_qk", Broadcast(Name("x_kv"), 1), level=Level.TILE)
    # A statement need not show that it is a tile: it may read only tiles, without a broadcast.
    square = assign("z_qk", Infix("*", Name("y_qk"), Name("y_qk")), level=Level.TILE)
    assert statements.vectors([vector, tile, square]) == [vector]
    assert statements.tiles([vector, tile, square]) == [tile, square]


def test_only_loads_of_elements_read_memory() -> None:
    assert assign("x", builtin("load", Name("x_ptr"))).reads_memory
    assert not assign("x", call("load_pairs", Name("x_ptr"))).reads_memory
    assert not Comment("x = load(x_ptr)").reads_memory


def test_without_leaves_out_what_defines_a_name() -> None:
    assert defines(statements.without(lines(("a", Name("x")), ("b", Name("a"))), ["a"])) == ["b"]


def test_renamed_changes_targets_and_values() -> None:
    assert statements.renamed(assign("a", Name("b")), {"a": "c", "b": "d"}) == assign("c", Name("d"))


def test_another_vector_of_keys_stays_one_sum() -> None:
    keys = Infix("+", Name("start_n"), Arange("BLOCK_N"))
    halves = Infix("+", Infix("*", Name("PART"), Name("KEYS")), Arange("KEYS"))
    assert TL.text(with_key_vector(keys, halves)) == "start_n + PART * KEYS + tl.arange(0, KEYS)"


@st.composite
def programs(draw: st.DrawFn) -> list[Assign]:
    """Statements that read arguments x, y and what was defined before them."""
    found: list[Assign] = []
    for _ in range(draw(st.integers(0, 8))):
        known = ["x", "y", *defines(found)]
        operands = [Name(draw(st.sampled_from(known))) for _ in range(2)]
        found.append(assign(draw(st.sampled_from(NAMES)), Infix("+", *operands)))
    return found


def run(program: list[Assign]) -> dict[str, int]:
    values = {"x": 3, "y": 5}
    for statement in program:
        values[statement.target] = eval(TL.text(statement.value), {}, values)
    return values


@given(programs(), st.sampled_from(NAMES))
def test_needed_computes_the_same_value(program: list[Assign], name: str) -> None:
    found = needed(program, {name})
    if name in defines(program):
        assert run(found)[name] == run(program)[name]
    else:
        assert found == []


@given(programs())
def test_free_and_defined_names_are_all_that_is_read(program: list[Assign]) -> None:
    assert free(program) <= {"x", "y"}
    assert uses(program) <= free(program) | set(defines(program))


@given(programs(), st.sets(st.sampled_from(NAMES)))
def test_needed_is_a_subsequence_that_needs_no_more(program: list[Assign], names: set[str]) -> None:
    found: list[Statement] = list(needed(program, names))
    left = iter(program)
    assert all(any(statement is other for other in left) for statement in found)
    assert needed(found, names) == found
