"""What a line of a spec may cost: long and nested expressions take time that grows slowly, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.analysis.intervals import MOST_NODES, decide
from codegen.analysis.schedule import Schedule, analyse
from codegen.ir.expr import Type
from codegen.ir.parse import Macro, Scope, parse
from codegen.load.spec_file import load
from codegen.load.yaml_tree import Document, Item
from codegen.util.errors import ExprError, SpecError
from tests.support.paths import DEFAULT_SPEC


def nested(open_: str, inner: str, close: str, depth: int) -> str:
    return open_ * depth + inner + close * depth


def test_a_conjunction_of_many_inequalities_gets_lists() -> None:
    text = " and ".join(f"kv_idx != {3 * i}" for i in range(150))
    assert analyse(parse(text, Scope(), Type.BOOL)).schedule is Schedule.LISTS


@pytest.mark.parametrize(
    "text",
    [
        nested("where(", "kv_idx < 3", ", q_idx < 5, q_idx > 7)", 25),
        nested("where(", "kv_idx < 3", ", q_idx, kv_idx) > 3", 25),
        nested("abs(", "kv_idx", " - q_idx)", 30) + " < 30",
        nested("(", "kv_idx", " % 7 * q_idx)", 30) + " < 30",
        nested("(", "kv_idx", " * (kv_idx - q_idx // 3))", 25) + " < 30",
    ],
)
def test_the_decision_on_a_nested_mask_does_not_grow_without_limit(text: str) -> None:
    decision = decide(parse(text, Scope(), Type.BOOL))
    assert max(decision.may.size, decision.must.size) <= MOST_NODES
    analyse(parse(text, Scope(), Type.BOOL))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (nested("(", "score", " ** 8)", 4), Type.FLOAT),
        (nested("(", "score", " ** 32)", 5), Type.FLOAT),
        (" and ".join(f"kv_idx != {i}" for i in range(2000)), Type.BOOL),
    ],
)
def test_an_expression_that_is_too_long_written_out_is_refused(text: str, kind: Type) -> None:
    with pytest.raises(ExprError, match=r"an expression has at most 1000 operations and operands, .*, got "):
        parse(text, Scope(), kind)


@pytest.mark.parametrize("body", ["m{0} and (q_idx > {1} or m{0})", "m{0} and m{0}"])
def test_named_masks_that_use_the_one_before_twice_are_read_once(body: str) -> None:
    macros = {"m0": Macro(name="m0", params=(), body="kv_idx % 7 < 3", type=Type.BOOL)}
    for i in range(1, 40):
        macros[f"m{i}"] = Macro(name=f"m{i}", params=(), body=body.format(i - 1, i), type=Type.BOOL)
    if body == "m{0} and m{0}":
        assert parse("m39", Scope(macros=macros), Type.BOOL) == parse("m0", Scope(macros=macros), Type.BOOL)
        return
    with pytest.raises(ExprError, match="named expressions written out"):
        parse("m39", Scope(macros=macros), Type.BOOL)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("65536 * (65536 * kv_idx) <= q_idx", "an integer must fit 32 bits, got 4294967296 by joining"),
        ("kv_idx - q_idx - 2147483647 - 5 < 0", "an integer must fit 32 bits, got 2147483652 by joining"),
        ("q_idx < " + nested("1e38 * (", "kv_idx", ")", 9), "a number must fit float32, got .* by joining"),
    ],
)
def test_literals_joined_by_folding_must_fit(text: str, problem: str) -> None:
    with pytest.raises(ExprError, match=problem):
        parse(text, Scope(), Type.BOOL)


def test_a_doc_of_any_length_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"variants:\n  v: {{doc: {'word ' * 3000}, mask: causal}}\n")
    with pytest.raises(
        SpecError,
        match=r"variants.v.doc: must have at most 10000 characters, got 14999; move the rest into a YAML comment$",
    ):
        load(spec)


def test_whether_an_item_has_problems_is_known_without_a_search() -> None:
    """20000 bad variants took two minutes when each one searched the problems of all others."""
    document = Document(str(DEFAULT_SPEC))
    item = Item(where="variants.a", line=1, node=document.root.node)
    assert not document.has_problem_in(item)
    document.note_at(1, "variants.ab.mask", "is of another")
    assert not document.has_problem_in(item)
    document.note_at(1, "variants.a.tensors.w", "is below it")
    document.problems.clear()
    assert document.has_problem_in(item)
