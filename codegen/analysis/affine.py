"""Affine forms of integer expressions and the normal form of masks, from which closed-form loop bounds follow.

A mask becomes a disjunction of terms, each a conjunction of atoms. An atom like `q_idx - kv_idx < size` or
`q_idx // 64 >= kv_idx // 64` is a `Step` form: a step function of the query plus one of the key plus a remainder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Op, Type, const, int_var

ZERO = const(0)

MOST_POSITION = 2**30
"""The largest position and integer scalar of a call. The sum of two fits 32 bits."""

MOST_INTEGER = 2**31 - 1

_BOUNDED = frozenset((*expr.BLOCK_ENDS, "b", "h", "hkv")) | expr.QUERY_NAMES | expr.KEY_NAMES

MOST_TERMS = 8
"""A mask that expands to more terms than this gets the `lists` schedule."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`q * q_idx + kv * kv_idx + rest`, with literal coefficients and a remainder uniform over a block."""

    q: int
    kv: int
    rest: Expr


@dataclass(frozen=True)
class Given(expr.Var):
    """A placeholder for an expression, `value`, that is one number in a run of the looped position."""

    value: Expr


def given(value: Expr, number: int) -> Given:
    """The placeholder of that number."""
    return Given(Type.INT, f"given {number}", value)


def of_positions(e: Expr) -> bool:
    """True if an integer expression reads only positions, batch rows and heads: no scalar and no tensor."""
    return _BOUNDED.issuperset(expr.names(e)) and not expr.loads(e)


def reach(e: Expr) -> int | None:
    """The most that an integer may be either way, with positions up to MOST_POSITION; None if that is not known, as for
    a scalar or a tensor's element."""
    if isinstance(e, expr.Const):
        return abs(int(e.value))
    if isinstance(e, Given):
        return reach(e.value)
    if isinstance(e, expr.Var):
        return MOST_POSITION if e.name in _BOUNDED else None
    e = expr.as_product(e)
    if not isinstance(e, Op) or e.op not in _REACH:
        return None
    if e.op == "floordiv" and not isinstance(e.args[1], expr.Const):
        return reach(e.args[0])
    parts = [reach(a) for a in e.args]
    known = [part for part in parts if part is not None]
    return _REACH[e.op](*known) if len(known) == len(parts) else None


_REACH: dict[str, Callable[..., int]] = {
    "neg": int,
    "abs": int,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, by: -(-a // by),
    "min": max,
    "max": max,
}


def _reads_tensor(e: Expr) -> bool:
    return bool(expr.loads(e)) or any(isinstance(x, Given) and _reads_tensor(x.value) for x in expr.walk(e))


def within_bits(bound: Expr) -> Expr:
    """A bound of a position such that its sums fit 32 bits, whatever the elements of tensors are.

    An element may be the largest integer, which means "no limit": `kv_idx <= limit[b, q_idx]` has the end `limit + 1`,
    and `q_idx - kv_idx < size[h]` the end `kv_idx + size` along the queries. Or two elements may be large, and their
    difference small: `kv_idx + start[b] <= stop[b]`. A bound beyond all positions is cut to about MOST_POSITION.
    """
    rest, literal = expr.split_literal(bound)
    if not _reads_tensor(rest):
        return bound
    parts = list(_signed(rest, 1))
    if parts == [(rest, 1)]:
        if literal:
            rest = expr.minimum(rest, _MOST) if literal > 0 else expr.maximum(rest, _LEAST)
        return expr.add(rest, const(literal))
    return expr.add(_saturated(parts), const(literal))


_MOST, _LEAST = const(MOST_POSITION), const(-MOST_POSITION)


def _saturated(parts: Sequence[tuple[Expr, int]]) -> Expr:
    """A signed sum of 32-bit integers, cut to slightly more than MOST_POSITION either way.

    Each part is split into high bits, whose sum fits 32 bits and is cut, and low bits, which are added afterwards.
    """
    low_bits = max((len(parts) - 1).bit_length(), 1)
    high: Expr = ZERO
    low: Expr = ZERO
    for part, sign in parts:
        add = expr.add if sign > 0 else expr.sub
        high = add(high, expr.shift_right(part, const(low_bits)))
        low = add(low, expr.bit_and(part, const(2**low_bits - 1)))
    most = const((MOST_POSITION >> low_bits) + len(parts))
    high = expr.maximum(expr.minimum(high, most), expr.neg(most))
    return expr.add(expr.shift_left(high, const(low_bits)), low)


def _signed(e: Expr, sign: int) -> Iterator[tuple[Expr, int]]:
    """The operands of a sum, each with the sign that it is added with."""
    if not (isinstance(e, Op) and e.op in ("add", "sub", "neg")):
        yield e, sign
        return
    last = sign if e.op == "add" else -sign
    for part in e.args[:-1]:
        yield from _signed(part, sign)
    yield from _signed(e.args[-1], last)


def linear(e: Expr) -> Linear | None:
    """The linear form of an integer expression, or None."""
    if expr.level(e) is Level.UNIFORM:
        return Linear(q=0, kv=0, rest=e)
    if e == int_var("q_idx"):
        return Linear(q=1, kv=0, rest=const(0))
    if e == int_var("kv_idx"):
        return Linear(q=0, kv=1, rest=const(0))
    return _arithmetic(e, linear, _plus, _times) if isinstance(e, Op) else None


_Form = TypeVar("_Form")


def _arithmetic(
    e: Op,
    read: Callable[[Expr], _Form | None],
    plus: Callable[[_Form, _Form], _Form | None],
    times: Callable[[int, _Form], _Form],
) -> _Form | None:
    """Combine the operands' forms for a sum, a difference, a negation or a product with a literal."""
    parts = [read(a) for a in e.args]
    if e.op == "neg" and parts[0] is not None:
        return times(-1, parts[0])
    if e.op in ("add", "sub") and parts[0] is not None and parts[1] is not None:
        return plus(parts[0], parts[1] if e.op == "add" else times(-1, parts[1]))
    if e.op == "mul":
        for factor, part in ((e.args[0], parts[1]), (e.args[1], parts[0])):
            if isinstance(factor, expr.Const) and part is not None:
                return times(int(factor.value), part)
    return None


def _plus(a: Linear, b: Linear) -> Linear:
    return Linear(q=a.q + b.q, kv=a.kv + b.kv, rest=expr.add(a.rest, b.rest))


def _times(factor: int, form: Linear) -> Linear:
    rest = expr.neg(form.rest) if factor == -1 else expr.mul(const(factor), form.rest)
    return Linear(q=factor * form.q, kv=factor * form.kv, rest=rest)


@dataclass(frozen=True, kw_only=True)
class Step:
    """`factor * ((x + shift) // period)` of one position x; `factor` is 0 if the position does not occur."""

    factor: int = 0
    shift: Expr = ZERO
    period: int = 1

    def at(self, x: Expr) -> Expr:
        inner = expr.floordiv(expr.add(x, self.shift), const(self.period))
        return expr.neg(inner) if self.factor == -1 else expr.mul(const(self.factor), inner)

    def least(self, value: Expr) -> Expr:
        """For a positive factor: the smallest x with `step(x) >= value`."""
        value = self._value(value)
        quotient = expr.neg(expr.floordiv(expr.neg(value), const(self.factor))) if self.factor > 1 else value
        return expr.sub(self._times_period(quotient), self.shift)

    def most(self, value: Expr) -> Expr:
        """For a negative factor: the largest x with `step(x) >= -value`."""
        value = self._value(value)
        quotient = expr.floordiv(value, const(-self.factor))
        return expr.sub(expr.add(self._times_period(quotient), const(self.period - 1)), self.shift)

    def _value(self, value: Expr) -> Expr:
        """A value that is divided by the factor or multiplied by the period: a sum that wraps must not reach these."""
        return value if abs(self.factor) == self.period == 1 else within_bits(value)

    def _times_period(self, quotient: Expr) -> Expr:
        """`quotient` periods as a number of positions.

        A scalar or a tensor may hold a huge number that means "no limit", and a position times a period may leave 32
        bits: `kv_idx // 1000 <= q_idx`. It is clamped so that the product fits 32 bits and still lies beyond every
        position.
        """
        most_known = reach(quotient)
        if self.period > 1 and (most_known is None or most_known * self.period > MOST_INTEGER):
            most = const(MOST_POSITION // self.period)
            quotient = expr.maximum(expr.minimum(quotient, most), expr.neg(most))
        return expr.mul(const(self.period), quotient)


@dataclass(frozen=True, kw_only=True)
class Form:
    """`q(q_idx) + kv(kv_idx) + rest >= 0`."""

    q: Step
    kv: Step
    rest: Expr

    def flipped(self) -> Form:
        """The form with queries and keys exchanged."""
        return Form(q=self.kv, kv=self.q, rest=self.rest)


def forms(atom: Expr) -> tuple[Form, ...]:
    """The inequalities equivalent to a comparison of integers; empty if its sides are not step functions."""
    if not (isinstance(atom, Op) and atom.op in ("lt", "le", "gt", "ge", "eq") and atom.args[0].type is Type.INT):
        return ()
    a, b = atom.args
    difference = _steps(expr.sub(a, b))
    if difference is None:
        return ()
    q, kv, rest = difference
    if not _fits(q, kv, rest):
        return ()
    at_least = Form(q=q, kv=kv, rest=rest)
    at_most = Form(q=_negative(q), kv=_negative(kv), rest=expr.neg(rest))
    return {
        "ge": (at_least,),
        "le": (at_most,),
        "gt": (_strict(at_least),),
        "lt": (_strict(at_most),),
        "eq": (at_least, at_most),
    }[atom.op]


def _fits(q: Step, kv: Step, rest: Expr) -> bool:
    """True if bounds computed from the form's literals fit 32 bits; those of `q_idx - kv_idx < 2**31 - 1` do not."""
    rest_literal, *shifts = (abs(expr.split_literal(e)[1]) for e in (rest, q.shift, kv.shift))
    return max(q.period, kv.period) * (rest_literal + 1) + max(shifts) <= MOST_POSITION


def _strict(form: Form) -> Form:
    return Form(q=form.q, kv=form.kv, rest=expr.sub(form.rest, const(1)))


def _negative(step: Step) -> Step:
    return Step(factor=-step.factor, shift=step.shift, period=step.period)


def _steps(e: Expr) -> tuple[Step, Step, Expr] | None:
    """An integer expression as a step of the query, a step of the key and a uniform remainder."""
    form = linear(e)
    if form is not None:
        return Step(factor=form.q), Step(factor=form.kv), form.rest
    e = expr.as_product(e)
    if not isinstance(e, Op):
        return None
    return _division(e) if e.op == "floordiv" else _arithmetic(e, _steps, _joined, _scaled)


_Steps = tuple[Step, Step, Expr]


def _joined(a: _Steps, b: _Steps) -> _Steps | None:
    """The sum of two forms; None if both have a step of the same position."""
    (q0, kv0, rest0), (q1, kv1, rest1) = a, b
    if (q0.factor and q1.factor) or (kv0.factor and kv1.factor):
        return None
    return q0 if q0.factor else q1, kv0 if kv0.factor else kv1, expr.add(rest0, rest1)


def _scaled(factor: int, steps: _Steps) -> _Steps:
    q, kv, rest = steps
    q, kv = (Step(factor=factor * s.factor, shift=s.shift, period=s.period) for s in (q, kv))
    return q, kv, expr.neg(rest) if factor == -1 else expr.mul(const(factor), rest)


def _division(e: Op) -> tuple[Step, Step, Expr] | None:
    inner, by = linear(e.args[0]), e.args[1]
    if inner is None or not isinstance(by, expr.Const) or by.value <= 0 or bool(inner.q) == bool(inner.kv):
        return None
    period = int(by.value)
    if inner.q + inner.kv == 1:
        step = Step(factor=1, shift=inner.rest, period=period)
    elif inner.q + inner.kv == -1:  # floor((r - x) / d) is -floor((x - r + d - 1) / d)
        step = Step(factor=-1, shift=expr.sub(const(period - 1), inner.rest), period=period)
    else:
        return None
    return (step, Step(), const(0)) if inner.q else (Step(), step, const(0))


# ---------------------------------------------------------------------------------------------------------- normal form


def terms(mask: Expr) -> list[tuple[Expr, ...]] | None:
    """The mask in disjunctive normal form, a list of conjunctions of atoms; None if it has more than MOST_TERMS.

    Contradictory terms are dropped, and so are terms that imply another term.
    """
    found = _disjuncts(mask)
    if found is None:
        return None
    return weakest(tuple(dict.fromkeys(term)) for term in found if not _contradicts(term))


def weakest(found: Iterable[tuple[Expr, ...]]) -> list[tuple[Expr, ...]]:
    """The terms without those that imply another one."""
    unique = dict.fromkeys(found)
    return [t for t in unique if not any(o != t and set(o) <= set(t) for o in unique)]


def _disjuncts(e: Expr) -> list[tuple[Expr, ...]] | None:
    if e == expr.FALSE:
        return []
    e = spread(e)
    if not isinstance(e, Op) or e.op not in ("and", "or"):
        return [() if e == expr.TRUE else (e,)]
    parts = [_disjuncts(a) for a in e.args]
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    sizes = map(len, known)
    if (sum(sizes) if e.op == "or" else prod(sizes)) > MOST_TERMS:  # counted before they are made
        return None
    return [t for p in known for t in p] if e.op == "or" else [sum(pick, ()) for pick in product(*known)]


def spread(e: Expr) -> Expr:
    """Rewrite one comparison into simpler ones.

    A comparison of integers with `abs`, `min` or `max` on one side, or `!=`, becomes comparisons without them. An
    equality of booleans becomes "both or neither".
    """
    if not isinstance(e, Op):
        return e
    if e.op == "where" and e.type is Type.BOOL:
        test, a, b = e.args
        return expr.logical_or(expr.logical_and(test, a), expr.logical_and(expr.logical_not(test), b))
    if e.op not in expr.COMPARISONS or e.args[0].type is Type.FLOAT or expr.level(e) is Level.UNIFORM:
        return e
    a, b = e.args
    if a.type is Type.BOOL:
        c = expr.logical_not(b)
        a, b, c, d = (a, b, expr.logical_not(a), c) if e.op == "eq" else (a, c, expr.logical_not(a), b)
        return expr.logical_or(expr.logical_and(a, b), expr.logical_and(c, d))
    if e.op == "ne" and forms(expr.compare("eq", a, b)):
        return expr.logical_or(expr.compare("lt", a, b), expr.compare("gt", a, b))
    for x, op, y in ((a, e.op, b), (b, _MIRRORED[e.op], a)):
        if op in ("lt", "le", "gt", "ge") and isinstance(x, Op) and x.op in ("abs", "min", "max"):
            # max(s, t) <= y if both are, max(s, t) >= y if one is; abs(s) is max(s, -s).
            every = (op in ("lt", "le")) == (x.op != "min")
            build = expr.logical_and if every else expr.logical_or
            if x.op == "abs":
                return build(expr.compare(op, x.args[0], y), expr.compare(_MIRRORED[op], x.args[0], expr.neg(y)))
            return build(*(expr.compare(op, option, y) for option in x.args))
    return e


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _contradicts(term: Iterable[Expr]) -> bool:
    """True if two inequalities of a term cannot both hold, because their sum is a negative literal."""
    found = [form for atom in term for form in forms(atom)]
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if a.q == _negative(b.q) and a.kv == _negative(b.kv):
                total = expr.add(a.rest, b.rest)
                if isinstance(total, expr.Const) and total.value < 0:
                    return True
    return False
