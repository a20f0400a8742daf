"""Symbolic differentiation of score expressions, with respect to `score` or to one element of a tensor.

At a kink each function has the derivative of torch's function of the same name, in kernels and in the references of
both frameworks: `relu` and `abs` have 0 at 0; equal arguments of `min` and `max` get half each, as in `torch.minimum`;
`clamp` has the derivative of its first argument at both of its ends. Integers are constants, and so are the results of
`floor`, `ceil` and `round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Load, Op, Type, Var, const

ZERO, HALF, ONE = const(0.0), const(0.5), const(1.0)

MOST_COPIED = 100
"""The longest derivative, as written out, whose half is made by halving what its choices choose from."""


@cache
def derivative(e: Expr, target: Var | Load) -> Expr:
    """d e / d target, simplified as it is built.

    >>> derivative(expr.power(expr.float_var("score"), 2), expr.float_var("score"))  # doctest: +ELLIPSIS
    Op(type=<Type.FLOAT: 'float'>, op='add', ...)
    """
    if e == target:
        return ONE
    if not isinstance(e, Op) or e.type is not Type.FLOAT or target not in expr.walk(e):
        return ZERO
    return _RULES[e.op](e, lambda part: derivative(part, target))


_D = Callable[[Expr], Expr]


class _Linear:
    """A linear function of a derivative, applied to what its choices choose from and to the parts of their sums.

    Where a choice makes the derivative zero, as that of `max(score, 0)` where score < 0, the result is zero as in
    torch, not NaN from an infinite factor: `sqrt(max(score, 0))`, `sqrt(1 - min(score, 1))`.
    """

    def __init__(self, f: Callable[[Expr], Expr]) -> None:
        self.f = f
        # A derivative uses many of its nodes more than once. They are known by identity: to compare them takes long.
        self._applied: dict[int, Expr] = {}
        self._chosen: dict[int, bool] = {}

    def __call__(self, d: Expr) -> Expr:
        if id(d) not in self._applied:
            self._applied[id(d)] = self._result(d)
        return self._applied[id(d)]

    def _result(self, d: Expr) -> Expr:
        if not self._chooses_zero(d):
            return d if d == ZERO else self.f(d)
        assert isinstance(d, Op)
        if d.op == "where":
            return expr.where(d.args[0], self(d.args[1]), self(d.args[2]))
        a, b = map(self, d.args)
        return expr.add(a, b) if d.op == "add" else _minus(a, b)

    def _chooses_zero(self, d: Expr) -> bool:
        """True if a derivative, or a part of its sum, is 0 by a choice."""
        if not isinstance(d, Op) or d.op not in ("where", "add", "sub"):
            return False
        if id(d) not in self._chosen:
            parts = d.args[1:] if d.op == "where" else d.args
            is_zero = d.op == "where" and ZERO in parts
            self._chosen[id(d)] = is_zero or any(self._chooses_zero(part) for part in parts)
        return self._chosen[id(d)]


def _times(factor: Expr, d: Expr) -> Expr:
    return _Linear(lambda part: expr.mul(factor, part))(d)


def _negative(d: Expr) -> Expr:
    return _Linear(expr.neg)(d)


def _minus(a: Expr, b: Expr) -> Expr:
    return _negative(b) if a == ZERO else expr.sub(a, b)


def _product(e: Op, d: _D) -> Expr:
    a, b = e.args
    return expr.add(_times(b, d(a)), _times(a, d(b)))


def _quotient(e: Op, d: _D) -> Expr:
    a, b = e.args
    return _Linear(lambda part: expr.div(part, b))(_minus(d(a), _times(e, d(b))))


def _extreme(comparison: str) -> Callable[[Op, _D], Expr]:
    def rule(e: Op, d: _D) -> Expr:
        (a, b), (da, db) = e.args, map(d, e.args)
        both = expr.add(da, db)
        # The factor goes to what choices choose from, unless that copies many nodes at each of many nested extremes.
        half = _times(HALF, both) if both.size <= MOST_COPIED else expr.mul(HALF, both)
        return expr.where(expr.compare("eq", a, b), half, expr.where(expr.compare(comparison, a, b), da, db))

    return rule


def _clamp(e: Op, d: _D) -> Expr:
    x, low, high = e.args
    beyond = expr.logical_or(expr.compare("gt", x, high), expr.compare("gt", low, high))
    return expr.where(beyond, d(high), expr.where(expr.compare("lt", x, low), d(low), d(x)))


def _chain(outer: Callable[[Op], Expr]) -> Callable[[Op, _D], Expr]:
    return lambda e, d: _times(outer(e), d(e.args[0]))


def _sign(e: Op) -> Expr:
    x = e.args[0]
    negative = expr.where(expr.compare("lt", x, ZERO), const(-1.0), ZERO)
    return expr.where(expr.compare("gt", x, ZERO), ONE, negative)


def _bell(e: Op) -> Expr:
    x = e.args[0]
    return expr.mul(const(2.0 / math.sqrt(math.pi)), expr.function("exp", expr.neg(expr.mul(x, x))))


def _lower_power(e: Op) -> Expr:
    x, exponent = e.args
    assert isinstance(exponent, Const)
    return expr.mul(exponent, expr.power(x, exponent.value - 1))


LN2 = const(math.log(2.0))

_RULES: dict[str, Callable[[Op, _D], Expr]] = {
    "float": lambda e, d: ZERO,  # of an integer
    **{name: lambda e, d: ZERO for name in expr.ROUNDINGS},
    "neg": lambda e, d: _negative(d(e.args[0])),
    "add": lambda e, d: expr.add(d(e.args[0]), d(e.args[1])),
    "sub": lambda e, d: _minus(d(e.args[0]), d(e.args[1])),
    "mul": _product,
    "div": _quotient,
    "where": lambda e, d: expr.where(e.args[0], d(e.args[1]), d(e.args[2])),
    "min": _extreme("lt"),
    "max": _extreme("gt"),
    "clamp": _clamp,
    "relu": _chain(lambda e: expr.where(expr.compare("gt", e.args[0], ZERO), ONE, ZERO)),
    "abs": _chain(_sign),
    "exp": _chain(lambda e: e),
    "exp2": _chain(lambda e: expr.mul(LN2, e)),
    "log": _chain(lambda e: expr.div(ONE, e.args[0])),
    "log2": _chain(lambda e: expr.div(const(1.0 / math.log(2.0)), e.args[0])),
    "log1p": _chain(lambda e: expr.div(ONE, expr.add(ONE, e.args[0]))),
    "sqrt": _chain(lambda e: expr.div(const(0.5), e)),
    "pow": _chain(_lower_power),
    "tanh": _chain(lambda e: expr.sub(ONE, expr.mul(e, e))),
    "sigmoid": _chain(lambda e: expr.mul(e, expr.sub(ONE, e))),
    "sin": _chain(lambda e: expr.function("cos", e.args[0])),
    "cos": _chain(lambda e: expr.neg(expr.function("sin", e.args[0]))),
    "tan": _chain(lambda e: expr.add(ONE, expr.mul(e, e))),
    "erf": _chain(_bell),
}
