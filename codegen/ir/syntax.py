"""Text to Python syntax tree, and the wording of messages about parts of an expression."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import TypeGuard

from codegen.ir import expr
from codegen.ir.expr import Expr, Type
from codegen.util.errors import ExprError

_HEADER = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*$", re.ASCII)


def parse_header(text: str) -> tuple[str, tuple[str, ...]]:
    """Split the key of a named expression: `window(size)` gives `("window", ("size",))`."""
    match = _HEADER.match(text)
    if match is None:
        raise ExprError(f"a named expression is written NAME or NAME(PARAM, ...), got {text!r}", 1)
    params = tuple(p.strip() for p in match[2].split(",")) if match[2] is not None else ()
    for p in params:
        if not p.isidentifier():
            raise ExprError(f"a parameter must be an identifier, got {p!r} in {text!r}", 1)
    if len(set(params)) < len(params):
        raise ExprError(f"parameters must differ, got {text!r}", 1)
    return match[1], params


def check_syntax(text: str) -> None:
    """Raise `ExprError` if `text` is no Python expression. Names are checked where a named expression is used."""
    syntax_tree(text)


TOO_DEEP = "the expression is nested too deeply"


def on_one_line(text: str) -> str:
    """The expression on one line: YAML lets it run over several."""
    return " ".join(line.strip() for line in text.strip().splitlines())


def syntax_tree(text: str) -> ast.expr:
    """The syntax tree of an expression, or an `ExprError` that points at the mistake."""
    flat = on_one_line(text)
    if "#" in flat:  # on one line a comment would swallow the lines after it
        raise ExprError(f"an expression cannot hold a comment: {flat!r}", flat.index("#") + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `5if` is a literal to Python, with a warning on the user's terminal
            return ast.parse(flat, mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes
        column = getattr(error, "offset", None) or len(flat) + 1  # 0: the text ended too early
        raise ExprError(f"not a Python expression: {flat!r} ({_said(error, flat, column)})", column) from None
    except (RecursionError, MemoryError):
        raise ExprError(TOO_DEEP, 1) from None


_FOREIGN = {"&&": "and", "||": "or", "!": "not"}
"""Operator of another language -> its Python spelling."""


def _said(error: SyntaxError | ValueError, flat: str, column: int) -> str:
    """Description of the syntax error at a column."""
    for symbol, word in _FOREIGN.items():
        # Python points at either character of an operator, depending on its version.
        if symbol in (flat[column - 1 :][: len(symbol)], flat[max(column - 2, 0) :][: len(symbol)]):
            return f"write '{word}' for '{symbol}'"
    return str(getattr(error, "msg", error))


# ----------------------------------------------------------------------------------------------- wording of messages


KINDS = {Type.BOOL: "a boolean", Type.INT: "an integer", Type.FLOAT: "a number"}


def with_article(t: Type) -> str:
    """The name of a type with its article."""
    return f"an {t.value}" if t is Type.INT else f"a {t.value}"


def type_remedy(got: Type, want: Type) -> str:
    """How to convert one type to another, as the tail of an error message."""
    if want is Type.BOOL:
        return "; write a comparison"
    if got is Type.BOOL:
        return "; use where(condition, a, b)"
    return "; use // or int(...)"


def source(node: ast.AST) -> str:
    """The text of a part of an expression, shortened for a message."""
    try:
        text = ast.unparse(node)
    except ValueError:  # Python prints no integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def indexing_example(name: str, dims: tuple[str | int, ...]) -> str:
    """How to index a tensor: `doc[b, kv_idx]`. One without dims is its name alone."""
    if not dims:
        return name
    return f"{name}[{', '.join(d if isinstance(d, str) else 'i' + str(n) for n, d in enumerate(dims))}]"


# --------------------------------------------------------------------------------------------------------- literals


def _fits(value: int | float | bool) -> bool:
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return value == 0 or 2.0**-126 <= abs(value) < 2.0**128


def is_too_large(e: Expr) -> TypeGuard[expr.Const]:
    """True for a literal that does not fit 32 bits, or float32."""
    return isinstance(e, expr.Const) and not _fits(e.value)


def is_infinite(e: Expr) -> bool:
    """True for a literal inf or -inf."""
    return isinstance(e, expr.Const) and abs(e.value) == math.inf


def joined_problem(literal: expr.Const, source: str) -> str:
    """Message for a literal that became too large when constants were folded."""
    kind, bits = ("an integer", "32 bits") if literal.type is Type.INT else ("a number", "float32")
    return f"{kind} must fit {bits}, got {literal.value} by joining the literals of {source!r}"
