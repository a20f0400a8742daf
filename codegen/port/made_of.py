"""Functions of torch that the language lacks, written with functions that it has."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence

from codegen.port.arithmetic import call
from codegen.port.values import Constant, Kind, Symbol

_ONE, _ZERO = ast.Constant(1), ast.Constant(0)

FUNCTIONS = ("rsqrt", "reciprocal", "expm1", "trunc", "fix", "frac", "softplus", "logsigmoid", "sign", "sgn")


def made_of_others(name: str, x: Symbol) -> Symbol:
    """One of `FUNCTIONS` of a number.

    >>> ast.unparse(made_of_others("frac", Symbol(ast.Name("score"), Kind.FLOAT)).node)
    'score - where(score < 0, ceil(score), floor(score))'
    """
    softplus = ast.BinOp(
        call("max", x.node, _ZERO), ast.Add(), call("log1p", call("exp", _negative(call("abs", x.node))))
    )
    truncated = call("where", _is_negative(x.node), call("ceil", x.node), call("floor", x.node))
    below = call("where", _is_negative(x.node), _negative(_ONE), _ZERO)
    sign = call("where", ast.Compare(x.node, [ast.Gt()], [_ZERO]), _ONE, below)
    made: dict[str, ast.expr] = {
        "rsqrt": ast.BinOp(_ONE, ast.Div(), call("sqrt", x.node)),
        "reciprocal": ast.BinOp(_ONE, ast.Div(), x.node),
        "expm1": ast.BinOp(call("exp", x.node), ast.Sub(), _ONE),
        "trunc": truncated,
        "fix": truncated,
        "frac": ast.BinOp(x.node, ast.Sub(), truncated),
        "softplus": softplus,
        "logsigmoid": ast.BinOp(x.node, ast.Sub(), softplus),
        "sign": sign,
        "sgn": sign,
    }
    return Symbol(made[name], Kind.INT if name in ("sign", "sgn") else Kind.FLOAT)


def truncated_quotient(a: Symbol, b: Symbol) -> ast.expr:
    """The quotient of two integers, rounded towards 0.

    >>> texts = ("q_idx - kv_idx", "7")
    >>> a, b = (Symbol(ast.parse(text, mode="eval").body, Kind.INT) for text in texts)
    >>> ast.unparse(truncated_quotient(a, b))
    'where(q_idx - kv_idx < 0, -(abs(q_idx - kv_idx) // 7), (abs(q_idx - kv_idx) // 7))'
    """
    is_positive = isinstance(b.node, ast.Constant)
    quotient = ast.BinOp(call("abs", a.node), ast.FloorDiv(), b.node if is_positive else call("abs", b.node))
    is_below: ast.expr = _is_negative(a.node)
    if not is_positive:
        is_below = ast.Compare(is_below, [ast.NotEq()], [_is_negative(b.node)])
    return call("where", is_below, _negative(quotient), quotient)


def folded(name: str, values: Sequence[object]) -> Constant | None:
    """A function of Python's module math, of numbers that are known; None if it has no finite value for them."""
    function: Callable[..., object] | None = getattr(math, name, None)
    try:
        result = function(*values) if callable(function) else None
    except (ArithmeticError, TypeError, ValueError):
        return None
    return Constant(result) if isinstance(result, int | float) and math.isfinite(result) else None


def _is_negative(node: ast.expr) -> ast.Compare:
    return ast.Compare(node, [ast.Lt()], [_ZERO])


def _negative(node: ast.expr) -> ast.UnaryOp:
    return ast.UnaryOp(ast.USub(), node)
