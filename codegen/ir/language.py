"""The expression language: its functions and operators, named expressions, and the names in scope."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from codegen.ir import expr
from codegen.ir.expr import Expr, ScalarType, TensorSpec, Type


@dataclass(frozen=True, kw_only=True)
class Macro:
    """A named, parametrised expression of `masks:` (type BOOL) or `scores:` (type FLOAT, whose value may be an
    integer)."""

    name: str
    params: tuple[str, ...]
    body: str
    type: Type


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The names that an expression may read besides the indices.

    If `axes` is given, the expression is the example of a tensor and reads only those axes. `bound` maps the parameters
    of the named expression being read to their arguments, `expanding` lists the named expressions it is nested in, and
    `expanded` caches expansions by name and arguments.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    scalars: Mapping[str, ScalarType] = field(default_factory=dict)
    macros: Mapping[str, Macro] = field(default_factory=dict)
    bound: Mapping[str, Expr] = field(default_factory=dict)
    expanding: tuple[str, ...] = ()
    expanded: dict[tuple[object, ...], Expr] = field(default_factory=dict, compare=False)
    axes: tuple[str, ...] | None = None


def _silu(x: Expr) -> Expr:
    return expr.mul(x, expr.function("sigmoid", x))


def _gelu(x: Expr) -> Expr:
    erf = expr.function("erf", expr.mul(expr.const(0.7071067811865476), x))
    return expr.mul(expr.const(0.5), expr.mul(x, expr.add(expr.const(1.0), erf)))


def _fold(pair: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    def chained(*args: Expr) -> Expr:
        result = args[0]
        for a in args[1:]:
            result = pair(result, a)
        return result

    return chained


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Expr]]] = {
    "abs": (1, 1, expr.absolute),
    "min": (2, 8, _fold(expr.minimum)),
    "max": (2, 8, _fold(expr.maximum)),
    "clamp": (3, 3, expr.clamp),
    "relu": (1, 1, expr.relu),
    "silu": (1, 1, lambda x: _silu(expr.to_float(x))),
    "gelu": (1, 1, lambda x: _gelu(expr.to_float(x))),
    "int": (1, 1, expr.to_integer),
    **{name: (1, 1, lambda x, name=name: expr.function(name, x)) for name in sorted(expr.FLOAT_FUNCTIONS)},
    **{name: (1, 1, lambda x, name=name: expr.rounded(name, x)) for name in sorted(expr.ROUNDINGS)},
}
"""Name -> (fewest arguments, most arguments, builder)."""

MOST_MEMBERS = 64
"""Longest list on the right of `in`: each element is one comparison in the kernels."""

INFINITY = "inf"
"""Name of the literal infinity: a score of `-inf` leaves a pair out."""

BINARY_OPERATORS = {
    ast.Add: ("+", expr.add),
    ast.Sub: ("-", expr.sub),
    ast.Mult: ("*", expr.mul),
    ast.Div: ("/", expr.div),
    ast.FloorDiv: ("//", expr.floordiv),
    ast.Mod: ("%", expr.mod),
}
"""Syntax node -> (symbol, builder)."""

Pair = Callable[[Expr, Expr], Expr]

BIT_OPERATORS: dict[type[ast.operator], tuple[str, Pair, Pair]] = {
    ast.BitAnd: ("&", expr.logical_and, expr.bit_and),
    ast.BitOr: ("|", expr.logical_or, expr.bit_or),
    ast.BitXor: ("^", lambda a, b: expr.compare("ne", a, b), expr.bit_xor),
}
"""Syntax node -> (symbol, builder for booleans, builder for the bits of integers)."""

SHIFT_OPERATORS: dict[type[ast.operator], tuple[str, Pair]] = {
    ast.LShift: ("<<", expr.shift_left),
    ast.RShift: (">>", expr.shift_right),
}
"""Syntax node -> (symbol, builder)."""

COMPARISON_OPERATORS = {
    ast.Lt: ("<", "lt"),
    ast.LtE: ("<=", "le"),
    ast.Gt: (">", "gt"),
    ast.GtE: (">=", "ge"),
    ast.Eq: ("==", "eq"),
    ast.NotEq: ("!=", "ne"),
}
"""Syntax node -> (symbol, name for `expr.compare`)."""
