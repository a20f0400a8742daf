"""Triton and Gluon as printers of one tree."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.expr import Level
from codegen.plan.code.dialects import FILTERS, GL, TL
from codegen.plan.code.statements import Assign, Comment, assign
from codegen.plan.code.tree import (
    STRENGTH,
    Arange,
    Broadcast,
    Cast,
    Choice,
    Code,
    DType,
    Group,
    Infix,
    Literal,
    Name,
    Prefix,
    added,
    builtin,
    call,
    is_zero,
    literal_text,
    product,
    rebuilt,
    renamed,
    total,
)

A, B, C = Name("a"), Name("b"), Name("c")


@pytest.mark.parametrize(
    ("code", "triton", "gluon"),
    [
        (builtin("maximum", A, Literal(0)), "tl.maximum(a, 0)", "gl.maximum(a, 0)"),
        (call("clamp_index", A, B), "clamp_index(a, b)", "clamp_index(a, b)"),
        # Gluon has no sigmoid of its own: the kernel file defines one.
        (builtin("sigmoid", A), "tl.sigmoid(a)", "sigmoid(a)"),
        (Cast(A, "float32"), "a.to(tl.float32)", "a.to(gl.float32)"),
        (Cast(Infix("+", A, B), "int64"), "(a + b).to(tl.int64)", "(a + b).to(gl.int64)"),
        (builtin("cast", A, DType("int32")), "tl.cast(a, tl.int32)", "gl.cast(a, gl.int32)"),
        (Arange("BLOCK_N"), "tl.arange(0, BLOCK_N)", "gl.arange(0, BLOCK_N, layout=KEY)"),
        (Arange("BLOCK_N", "OWN_KEY"), "tl.arange(0, BLOCK_N)", "gl.arange(0, BLOCK_N, layout=OWN_KEY)"),
        (Broadcast(A, 0), "a[:, None]", "a[:, None]"),
        (Broadcast(Infix("-", A, B), 1), "(a - b)[None, :]", "(a - b)[None, :]"),
        (
            Choice(builtin("load", A, mask=B, other=Literal(0)), Name("POSITIONS"), Infix("+", B, C)),
            "tl.load(a, mask=b, other=0) if POSITIONS else b + c",
            "gl.load(a, mask=b, other=0) if POSITIONS else b + c",
        ),
    ],
)
def test_two_dialects_of_one_tree(code: Code, triton: str, gluon: str) -> None:
    assert (TL.text(code), GL.text(code)) == (triton, gluon)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (Infix("*", Infix("+", A, B), C), "(a + b) * c"),
        (Infix("-", A, Infix("-", B, C)), "a - (b - c)"),
        (Infix("-", Infix("-", A, B), C), "a - b - c"),
        (Infix("&", Infix("<", A, B), Infix("==", B, C)), "(a < b) & (b == c)"),
        (Infix("<", Infix("<", A, B), C), "(a < b) < c"),
        (Prefix("~", Infix("|", A, B)), "~(a | b)"),
        (Prefix("-", Infix("*", A, B)), "-(a * b)"),
        (product(A, Literal(-2.0)), "a * -2.0"),
        (Cast(Literal(-2), "int32"), "(-2).to(tl.int32)"),
        (Group(A), "(a)"),
        (total([A, product(B, C), A]), "a + b * c + a"),
        (added(A, Infix("-", B, C)), "a + b - c"),
        (Choice(A, Infix("<", B, C), Choice(B, A, C)), "a if b < c else b if a else c"),
    ],
)
def test_parentheses_stand_where_an_operand_binds_looser(code: Code, text: str) -> None:
    assert TL.text(code) == text


def test_numbers() -> None:
    assert [literal_text(x) for x in (0, 1.5, True, float("-inf"))] == ["0", "1.5", "True", 'float("-inf")']
    assert is_zero(Literal(0))
    assert not is_zero(None)
    assert not is_zero(Name("zero"))


def test_lines() -> None:
    both = Assign(targets=("a", "b"), values=(A, builtin("load", B)), level=Level.UNIFORM)
    assert GL.line(both) == "a, b = a, gl.load(b)"
    assert TL.line(Comment("of both")) == "# of both"
    assert FILTERS["tl"](assign("a", B)) == "a = b"
    assert FILTERS["gl"](builtin("abs", A)) == "gl.abs(a)"


def codes() -> st.SearchStrategy[Code]:
    leaves = st.sampled_from([A, B, C, Literal(2), Literal(-3)])
    symbols = st.sampled_from(sorted(STRENGTH))

    def grown(inner: st.SearchStrategy[Code]) -> st.SearchStrategy[Code]:
        return st.one_of(
            st.builds(Infix, symbols, inner, inner),
            st.builds(Prefix, st.sampled_from("-~"), inner),
            st.builds(lambda x, y: call("f", x, y), inner, inner),
            st.builds(Choice, inner, inner, inner),
            st.builds(Broadcast, inner, st.sampled_from((0, 1))),
        )

    return st.recursive(leaves, grown, max_leaves=12)


def tree(node: ast.expr) -> object:
    """Python's syntax tree, as nested tuples."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return -value  # type: ignore[operator]  # of a number
        case ast.UnaryOp(op=op, operand=operand):
            return type(op).__name__, tree(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return type(operator).__name__, tree(left), tree(right)
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            return type(comparison).__name__, tree(left), tree(right)
        case ast.Call(args=args):
            return "call", *map(tree, args)
        case ast.IfExp(body=body, test=test, orelse=orelse):
            return "if", tree(body), tree(test), tree(orelse)
        case ast.Subscript(value=value, slice=ast.Tuple(elts=[first, _])):
            return "axis", int(not isinstance(first, ast.Slice)), tree(value)
    raise AssertionError(ast.dump(node))


PYTHON = {
    "+": "Add", "-": "Sub", "*": "Mult", "/": "Div", "//": "FloorDiv", "<<": "LShift", ">>": "RShift", "&": "BitAnd",
    "|": "BitOr", "^": "BitXor", "<": "Lt", "<=": "LtE", ">": "Gt", ">=": "GtE", "==": "Eq", "!=": "NotEq",
}  # fmt: skip


def meant(code: Code) -> object:
    """The tree of kernel code, as nested tuples."""
    match code:
        case Name(name=name):
            return name
        case Literal(value=value):
            return value
        case Infix(symbol=symbol, left=left, right=right):
            return PYTHON[symbol], meant(left), meant(right)
        case Prefix(symbol="-", operand=Literal(value=value)):
            return -value if value >= 0 else ("USub", value)
        case Prefix(symbol=symbol, operand=operand):
            return "USub" if symbol == "-" else "Invert", meant(operand)
        case Choice(value=value, condition=condition, otherwise=otherwise):
            return "if", meant(value), meant(condition), meant(otherwise)
        case Broadcast(vector=vector, axis=axis):
            return "axis", axis, meant(vector)
    return "call", *map(meant, code.children)


@given(codes())
def test_python_reads_the_tree_that_was_printed(code: Code) -> None:
    assert tree(ast.parse(TL.text(code), mode="eval").body) == meant(code)
    assert GL.text(code) == TL.text(code)  # for nodes that both dialects spell alike


@given(codes())
def test_names_are_those_of_the_printed_source(code: Code) -> None:
    printed = {node.id for node in ast.walk(ast.parse(TL.text(code))) if isinstance(node, ast.Name)} - {"f"}
    assert code.names == printed


@given(codes())
def test_a_copy_is_equal_and_a_renamed_one_reads_other_names(code: Code) -> None:
    assert rebuilt(code, lambda node: None) == code
    assert "a" not in renamed(code, {"a": "d"}).names
