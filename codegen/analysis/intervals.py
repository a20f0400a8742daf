"""Block status: what interval arithmetic proves of a mask over a block of queries by a block of keys.

The result is two expressions over the first and last positions of the block. A kernel, numpy and a test evaluate the
same expressions, at a cost that does not depend on the block size. They may be conservative, but never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from codegen.analysis.affine import linear, spread
from codegen.analysis.grids import GridRead, GridSide, grid_axes
from codegen.analysis.interval_arithmetic import (
    UNDECIDED,
    UNKNOWN,
    Interval,
    Truth,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    exactly,
    from_both,
    from_either,
    hull,
    provided,
    unless,
)
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, Level, Op, Type, Var, const, int_var, level

Q_FIRST, Q_LAST, KV_FIRST, KV_LAST = map(int_var, expr.BLOCK_ENDS)
Q_POSITIONS, KV_POSITIONS = Interval(Q_FIRST, Q_LAST), Interval(KV_FIRST, KV_LAST)

LEAST_BLOCK = 16
"""Smallest block size: `x % n` for `n` up to it takes every value in each block."""

MOST_NODES = 1000
"""Longest bound, as written out. A longer one counts as unknown: some rules repeat their bounds."""

LARGEST = 3.4028234663852886e38
"""The largest finite float32."""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """A value per query or per key that depends on a tensor. Its minimum and maximum over each block are computed once,
    ahead of the kernel.

    Booleans count as 0 and 1. The extremes of a float that is NaN somewhere in the block are -inf and inf.
    """

    value: Expr
    minimum: Var
    maximum: Var

    @property
    def of_queries(self) -> bool:
        return level(self.value) is Level.QUERY


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The status of a block, as boolean expressions over `q_first q_last kv_first kv_last`, all inclusive.

    The block is EMPTY (no pair is kept) if `may` is false, FULL (every pair is kept) if `must` is true, and PARTIAL
    otherwise. The two expressions read the extremes of `reads` and of `grids`.
    """

    may: Expr
    must: Expr
    reads: tuple[Extreme, ...]
    grids: tuple[GridRead, ...] = ()


def decide(mask: Expr, *, grids: bool = True) -> Decision:
    """The status of a block under a mask. Without `grids`, blocks that depend on a grid's elements are partial.

    >>> from codegen.ir.printers import FormulaPrinter
    >>> causal = decide(expr.compare("ge", int_var("q_idx"), int_var("kv_idx")))
    >>> [FormulaPrinter().text(e) for e in (causal.may, causal.must)]
    ['q_last >= kv_first', 'q_first >= kv_last']
    """
    analyser = _Analyser(looks_into_grids=grids)
    truth = analyser.truth(mask)
    reads, read_grids = tuple(analyser.reads.values()), tuple(analyser.grids.values())
    return Decision(may=truth.may, must=truth.must, reads=reads, grids=read_grids)


# Float operations whose rounding is monotone: bounds computed by the same operations hold for the rounded values too.
# `mul` is missing because one kernel may contract it with a sum into an fma and another may not.
_MONOTONE_FLOAT = {
    *("add", "sub", "neg", "min", "max", "abs", "float", "where", "not", "and", "or"),
    *expr.COMPARISONS,
    *expr.ROUNDINGS,
}


@dataclass
class _Analyser:
    looks_into_grids: bool = True
    reads: dict[Expr, Extreme] = field(default_factory=dict)
    grids: dict[Expr, GridRead] = field(default_factory=dict)
    _truths: dict[Expr, Truth] = field(default_factory=dict)
    _intervals: dict[Expr, Interval] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------- booleans

    def truth(self, e: Expr) -> Truth:
        if e not in self._truths:
            found = self._truth(e)
            may, must = (known if known.size <= MOST_NODES else None for known in (found.may, found.must))
            self._truths[e] = Truth(TRUE if may is None else may, FALSE if must is None else must)
        return self._truths[e]

    def _truth(self, e: Expr) -> Truth:
        if level(e) is Level.UNIFORM:
            return Truth(e, e)
        if _needs_extremes(e):
            extreme = self._extreme(e)
            return Truth(_positive(extreme.maximum), _positive(extreme.minimum))
        if grid := self._grid(e):
            return Truth(_positive(grid.maximum), _positive(grid.minimum))
        if not isinstance(e, Op):
            return UNDECIDED
        if e.op in ("and", "or"):
            build = expr.logical_and if e.op == "and" else expr.logical_or
            parts = [self.truth(a) for a in e.args]
            may, must = [p.may for p in parts], [p.must for p in parts]
            # Leaving out long parts is safe in the `may` of a conjunction and in the `must` of a disjunction.
            return (
                Truth(build(*_shortest(may)), build(*must))
                if e.op == "and"
                else Truth(build(*may), build(*_shortest(must)))
            )
        if e.op == "not":
            return self.truth(e.args[0]).negated()
        if e.op == "where":
            return self._choice(e)
        # Sharper, and it avoids a bug: in max(max(a, -b), c) the assembler of CUDA 12.8 loses the sign on sm_90.
        apart = spread(e)
        return self._comparison(e) if apart == e else self.truth(apart)

    def _choice(self, e: Op) -> Truth:
        test, a, b = (self.truth(x) for x in e.args)
        may = expr.logical_or(expr.logical_and(test.may, a.may), expr.logical_and(expr.logical_not(test.must), b.may))
        must = expr.logical_or(
            expr.logical_and(test.must, a.must),
            expr.logical_and(expr.logical_not(test.may), b.must),
            expr.logical_and(a.must, b.must),
        )
        return Truth(may, must)

    def _comparison(self, e: Op) -> Truth:
        a, b = e.args
        both_sides = _positions(a) & _positions(b)
        # Elements of tensors that are one number in a block may be the largest integer, which means "no limit": a
        # difference with one would leave 32 bits. Extremes over a block have 64.
        has_element = any(level(load) not in (Level.QUERY, Level.KEY) for load in (*expr.loads(a), *expr.loads(b)))
        if a.type is Type.INT and both_sides and not has_element:
            # If q_idx is on both sides, their difference contains it once or not at all.
            a, b = expr.sub(a, b), const(0)
        x, y = self.interval(a), self.interval(b)
        ordered = expr.logical_and(self._numbers(a), self._numbers(b))
        match e.op:
            case "lt":
                return Truth(unless("ge", x.low, y.high), expr.logical_and(provided("lt", x.high, y.low), ordered))
            case "le":
                return Truth(unless("gt", x.low, y.high), expr.logical_and(provided("le", x.high, y.low), ordered))
            case "gt":
                return Truth(unless("le", x.high, y.low), expr.logical_and(provided("gt", x.low, y.high), ordered))
            case "ge":
                return Truth(unless("lt", x.high, y.low), expr.logical_and(provided("ge", x.low, y.high), ordered))
        meet = expr.logical_and(unless("gt", x.low, y.high), unless("lt", x.high, y.low))
        same = expr.logical_and(provided("ge", x.low, y.high), provided("le", x.high, y.low), ordered)
        return Truth(meet, same) if e.op == "eq" else Truth(meet, same).negated()

    def _numbers(self, e: Expr) -> Expr:
        """A condition under which no value of the block is NaN. `must` needs it because every comparison with NaN,
        except `!=`, is false. The subexpression that makes the NaN, a read of a tensor or inf - inf, has an interval
        with an infinite end; a uniform NaN fails the comparison by itself."""
        if e.type is not Type.FLOAT or level(e) is Level.UNIFORM:
            return TRUE
        parts: list[Expr] = []
        if isinstance(e, Op) and not _needs_extremes(e):
            if e.op == "float":
                return TRUE
            parts = [self._numbers(a) for a in e.args]
            if e.op in ("neg", "abs", "min", "max", "where", *expr.ROUNDINGS):
                return expr.logical_and(*parts)
        x = self.interval(e)
        if x.low is None or x.high is None:
            return FALSE
        finite = expr.compare("ge", x.low, const(-LARGEST)), expr.compare("le", x.high, const(LARGEST))
        return expr.logical_and(*finite, *parts)

    # -------------------------------------------------------------------------------------------------------- numbers

    def interval(self, e: Expr) -> Interval:
        if e not in self._intervals:
            found = self._interval(e)
            ends = (end if end is not None and end.size <= MOST_NODES else None for end in (found.low, found.high))
            self._intervals[e] = Interval(*ends)
        return self._intervals[e]

    def _interval(self, e: Expr) -> Interval:
        if level(e) is Level.UNIFORM:
            return Interval(e, e)
        if _needs_extremes(e):
            extreme = self._extreme(e)
            return Interval(extreme.minimum, extreme.maximum)
        if grid := self._grid(e):
            return Interval(grid.minimum, grid.maximum)
        if isinstance(e, Var):
            return {"q_idx": Q_POSITIONS, "kv_idx": KV_POSITIONS}.get(e.name, UNKNOWN)
        if not isinstance(e, Op) or (e.type is Type.FLOAT and e.op not in _MONOTONE_FLOAT):
            return UNKNOWN
        form = linear(e) if e.type is Type.INT else None
        if form is not None:
            return Q_POSITIONS.scaled(form.q) + KV_POSITIONS.scaled(form.kv) + exactly(form.rest)
        if e.op in expr.ROUNDINGS:
            return self.interval(e.args[0]).map(partial(expr.rounded, e.op))
        rule = getattr(self, f"_{e.op}", None)
        return rule(*e.args) if rule is not None else UNKNOWN

    def _add(self, a: Expr, b: Expr) -> Interval:
        return self.interval(a) + self.interval(b)

    def _sub(self, a: Expr, b: Expr) -> Interval:
        return self.interval(a) - self.interval(b)

    def _neg(self, a: Expr) -> Interval:
        return -self.interval(a)

    def _float(self, a: Expr) -> Interval:
        return self.interval(a).map(expr.to_float)

    def _mul(self, a: Expr, b: Expr) -> Interval:
        x, y = self.interval(a), self.interval(b)
        if isinstance(a, expr.Const):
            return y.scaled(int(a.value))
        return hull([from_both(expr.mul, s, t) for s in x.bounds for t in y.bounds])

    def _min(self, a: Expr, b: Expr) -> Interval:
        x, y = self.interval(a), self.interval(b)
        return Interval(from_both(expr.minimum, x.low, y.low), from_either(expr.minimum, x.high, y.high))

    def _max(self, a: Expr, b: Expr) -> Interval:
        x, y = self.interval(a), self.interval(b)
        return Interval(from_either(expr.maximum, x.low, y.low), from_both(expr.maximum, x.high, y.high))

    def _abs(self, a: Expr) -> Interval:
        low, high = self.interval(a).low, self.interval(a).high
        zero = expr.const(0.0 if a.type is Type.FLOAT else 0)
        if low is None or high is None:
            return Interval(zero, None)
        # `where`, not max(low, -high, 0): see the assembler bug in `_truth`.
        least = expr.where(
            expr.compare("ge", low, zero), low, expr.where(expr.compare("le", high, zero), expr.neg(high), zero)
        )
        return Interval(least, expr.where(expr.compare("ge", high, expr.neg(low)), high, expr.neg(low)))

    def _where(self, test: Expr, a: Expr, b: Expr) -> Interval:
        condition, x, y = self.truth(test), self.interval(a), self.interval(b)

        def chosen(pick: Callable[[Expr, Expr], Expr], s: Expr | None, t: Expr | None) -> Expr | None:
            if s is None or t is None:
                return None
            return expr.where(condition.must, s, expr.where(condition.may, pick(s, t), t))

        return Interval(chosen(expr.minimum, x.low, y.low), chosen(expr.maximum, x.high, y.high))

    def _floordiv(self, a: Expr, b: Expr) -> Interval:
        x = self.interval(a)
        if level(b) is not Level.UNIFORM:
            return UNKNOWN
        if isinstance(b, expr.Const):
            return (x.map if b.value > 0 else x.map_reversed)(lambda s: expr.floordiv(s, b))
        quotients = x.map(lambda s: expr.floordiv(s, b))
        return hull([quotients.low, quotients.high])

    def _mod(self, a: Expr, b: Expr) -> Interval:
        if level(b) is not Level.UNIFORM:
            return UNKNOWN
        least, most = expr.minimum(expr.add(b, const(1)), const(0)), expr.maximum(expr.sub(b, const(1)), const(0))
        x, form = self.interval(a), linear(a)
        sweeps = form is not None and 1 in (abs(form.q), abs(form.kv))
        if x.low is None or x.high is None or (sweeps and isinstance(b, expr.Const) and abs(b.value) <= LEAST_BLOCK):
            return Interval(least, most)
        # Within one period the remainder increases.
        one_period = expr.compare("eq", expr.floordiv(x.low, b), expr.floordiv(x.high, b))
        low = expr.where(one_period, expr.mod(x.low, b), least)
        return Interval(low, expr.where(one_period, expr.mod(x.high, b), most))

    def _shl(self, a: Expr, by: Expr) -> Interval:
        x = self.interval(a)
        if level(by) is not Level.UNIFORM:
            return UNKNOWN
        return x.map(lambda s: expr.shift_left(s, by))

    def _shr(self, a: Expr, by: Expr) -> Interval:
        x = self.interval(a)
        if level(by) is not Level.UNIFORM:
            return UNKNOWN
        return x.map(lambda s: expr.shift_right(s, by))

    def _bitand(self, a: Expr, b: Expr) -> Interval:
        product = expr.as_product(Op(Type.INT, "bitand", (a, b)))
        if isinstance(product, Op) and product.op != "bitand":
            return self.interval(product)
        for x, y in ((a, b), (b, a)):
            size = int(y.value) + 1 if isinstance(y, expr.Const) else 0
            if 0 < size <= 1 << expr.LAST_SHIFT and size & (size - 1) == 0:
                return self._mod(x, const(size))
        return bitwise_and(self.interval(a), self.interval(b))

    def _bitor(self, a: Expr, b: Expr) -> Interval:
        return bitwise_or(self.interval(a), self.interval(b))

    def _bitxor(self, a: Expr, b: Expr) -> Interval:
        return bitwise_xor(self.interval(a), self.interval(b))

    def _extreme(self, e: Expr) -> Extreme:
        if e not in self.reads:
            side = "q" if level(e) is Level.QUERY else "kv"
            tensor = next(x.tensor for x in expr.loads(e) if level(x) is not Level.UNIFORM)
            minimum, maximum = self._ends(e, f"{tensor}_{side}")
            self.reads[e] = Extreme(value=e, minimum=minimum, maximum=maximum)
        return self.reads[e]

    def _grid(self, e: Expr) -> GridRead | None:
        """The read of a grid that `e` is, if the indices of a block are known."""
        if e in self.grids:
            return self.grids[e]
        if not self.looks_into_grids or not isinstance(e, expr.Load) or (axes := grid_axes(e)) is None:
            return None
        sides: list[GridSide] = []
        for axis in axes:
            x = self.interval(e.indices[axis])
            if x.low is None or x.high is None:
                return None
            sides.append(GridSide(axis=axis, first=x.low, last=x.high))
        minimum, maximum = self._ends(e, f"{e.tensor}_grid")
        self.grids[e] = GridRead(load=e, queries=sides[0], keys=sides[1], minimum=minimum, maximum=maximum)
        return self.grids[e]

    def _ends(self, e: Expr, stem: str) -> tuple[Var, Var]:
        """New names for the smallest and largest value of `e` in a block."""
        taken = {x.minimum.name for x in self.reads.values()} | {x.minimum.name for x in self.grids.values()}
        name, n = stem, 2
        while f"{name}_min" in taken:
            name, n = f"{stem}_{n}", n + 1
        kind = Type.FLOAT if e.type is Type.FLOAT else Type.INT
        return Var(kind, f"{name}_min"), Var(kind, f"{name}_max")


def _shortest(parts: list[Expr]) -> list[Expr]:
    """The shortest of several expressions, as many as fit `MOST_NODES` together."""
    kept: set[int] = set()
    left = MOST_NODES - 1
    for i in sorted(range(len(parts)), key=lambda i: parts[i].size):
        left -= parts[i].size
        if left >= 0:
            kept.add(i)
    return [part for i, part in enumerate(parts) if i in kept]


def _needs_extremes(e: Expr) -> bool:
    """True for a value per query or per key that reads a tensor: its extremes over a block are best computed per
    element."""
    if level(e) not in (Level.QUERY, Level.KEY) or all(level(x) is Level.UNIFORM for x in expr.loads(e)):
        return False
    floats = [node for node in expr.walk(e) if isinstance(node, Op) and node.type is Type.FLOAT]
    return all(node.op in _MONOTONE_FLOAT for node in floats)


def _positions(e: Expr) -> frozenset[str]:
    return expr.names(e) & (expr.QUERY_NAMES | expr.KEY_NAMES)


def _positive(e: Expr) -> Expr:
    return expr.compare("gt", e, const(0))
