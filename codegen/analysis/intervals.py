"""Three-valued block analysis: what interval arithmetic can prove of a mask over a block of queries by a block of keys.

The answer is itself two expressions, over the block's first and last positions: a kernel, numpy and a test evaluate
them alike, at a cost that does not depend on the size of the block. They may be conservative, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from codegen.analysis.affine import linear, spread
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, Level, Op, Type, Var, const, int_var, level

Q_FIRST, Q_LAST, KV_FIRST, KV_LAST = map(int_var, ("q_first", "q_last", "kv_first", "kv_last"))

LEAST_BLOCK = 16
"""No block is smaller (`tiles.BLOCK_SIZES`): a residue below it takes every value in each."""


MOST_NODES = 1000
"""A bound that is longer, written out, counts as unknown: some rules use theirs several times."""

LARGEST = 3.4028234663852886e38
"""The largest finite float32."""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """A value per query or per key that depends on a tensor: its smallest and largest over a block are computed once.

    Booleans count as 0 and 1. A float that is NaN somewhere in the block has the extremes -inf and inf.
    """

    value: Expr
    minimum: Var
    maximum: Var

    @property
    def of_queries(self) -> bool:
        return level(self.value) is Level.QUERY


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is known of a block, as boolean expressions over `q_first q_last kv_first kv_last`, all inclusive.

    Not `may`: no pair is kept, the block is EMPTY. `must`: every pair is, it is FULL. Otherwise it is PARTIAL. `reads`
    are the extremes that the two expressions need.
    """

    may: Expr
    must: Expr
    reads: tuple[Extreme, ...]


def decide(mask: Expr) -> Decision:
    """The decision on a mask.

    >>> from codegen.ir.printers import FormulaPrinter
    >>> causal = decide(expr.compare("ge", int_var("q_idx"), int_var("kv_idx")))
    >>> [FormulaPrinter().text(e) for e in (causal.may, causal.must)]
    ['q_last >= kv_first', 'q_first >= kv_last']
    """
    analyser = _Analyser()
    truth = analyser.truth(mask)
    return Decision(may=truth.may, must=truth.must, reads=tuple(analyser.reads.values()))


@dataclass(frozen=True)
class _Truth:
    may: Expr
    must: Expr


@dataclass(frozen=True)
class _Interval:
    """Bounds of a number over the block; None where nothing is known."""

    low: Expr | None
    high: Expr | None


_UNKNOWN = _Interval(None, None)
_UNDECIDED = _Truth(TRUE, FALSE)

# Their rounding is monotone, so that bounds computed by the same operations hold for the rounded values too. A product
# may be contracted with a sum in one kernel and not in the other.
_EXACT_FLOAT = {
    *("add", "sub", "neg", "min", "max", "abs", "float", "where", "not", "and", "or"),
    *expr.COMPARISONS,
    *expr.ROUNDINGS,
}


@dataclass
class _Analyser:
    reads: dict[Expr, Extreme] = field(default_factory=dict)
    _truths: dict[Expr, _Truth] = field(default_factory=dict)
    _intervals: dict[Expr, _Interval] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------- booleans

    def truth(self, e: Expr) -> _Truth:
        if e not in self._truths:
            found = self._truth(e)
            may, must = (known if known.size <= MOST_NODES else None for known in (found.may, found.must))
            self._truths[e] = _Truth(TRUE if may is None else may, FALSE if must is None else must)
        return self._truths[e]

    def _truth(self, e: Expr) -> _Truth:
        if level(e) is Level.UNIFORM:
            return _Truth(e, e)
        if _needs_extremes(e):
            extreme = self._extreme(e)
            return _Truth(_positive(extreme.maximum), _positive(extreme.minimum))
        if not isinstance(e, Op):
            return _UNDECIDED
        if e.op in ("and", "or"):
            build = expr.logical_and if e.op == "and" else expr.logical_or
            parts = [self.truth(a) for a in e.args]
            may, must = [p.may for p in parts], [p.must for p in parts]
            # Of what all must hold for, any may go unsaid as far as `may` is concerned; of what one does, for `must`.
            return (
                _Truth(build(*_shortest(may)), build(*must))
                if e.op == "and"
                else _Truth(build(*may), build(*_shortest(must)))
            )
        if e.op == "not":
            return _negated(self.truth(e.args[0]))
        if e.op == "where":
            return self._choice(e)
        # Not only sharper: of max(max(a, -b), c) the assembler of CUDA 12.8 loses the sign on sm_90.
        apart = spread(e)
        return self._comparison(e) if apart == e else self.truth(apart)

    def _choice(self, e: Op) -> _Truth:
        test, a, b = (self.truth(x) for x in e.args)
        may = expr.logical_or(expr.logical_and(test.may, a.may), expr.logical_and(expr.logical_not(test.must), b.may))
        must = expr.logical_or(
            expr.logical_and(test.must, a.must),
            expr.logical_and(expr.logical_not(test.may), b.must),
            expr.logical_and(a.must, b.must),
        )
        return _Truth(may, must)

    def _comparison(self, e: Op) -> _Truth:
        a, b = e.args
        both_sides = _positions(a) & _positions(b)
        if a.type is Type.INT and both_sides:
            # q_idx on either side: their difference may have it once, or not at all.
            a, b = expr.sub(a, b), const(0)
        x, y = self.interval(a), self.interval(b)
        ordered = expr.logical_and(self._numbers(a), self._numbers(b))
        match e.op:
            case "lt":
                return _Truth(_unless("ge", x.low, y.high), expr.logical_and(_provided("lt", x.high, y.low), ordered))
            case "le":
                return _Truth(_unless("gt", x.low, y.high), expr.logical_and(_provided("le", x.high, y.low), ordered))
            case "gt":
                return _Truth(_unless("le", x.high, y.low), expr.logical_and(_provided("gt", x.low, y.high), ordered))
            case "ge":
                return _Truth(_unless("lt", x.high, y.low), expr.logical_and(_provided("ge", x.low, y.high), ordered))
        meet = expr.logical_and(_unless("gt", x.low, y.high), _unless("lt", x.high, y.low))
        same = expr.logical_and(_provided("ge", x.low, y.high), _provided("le", x.high, y.low), ordered)
        return _Truth(meet, same) if e.op == "eq" else _negated(_Truth(meet, same))

    def _numbers(self, e: Expr) -> Expr:
        """Whether no value of the block is a NaN, which no comparison but `!=` keeps. One that a tensor holds, or that
        inf - inf gives, leaves an infinite end to the interval it first appears in; a uniform one shows itself."""
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

    def interval(self, e: Expr) -> _Interval:
        if e not in self._intervals:
            found = self._interval(e)
            ends = (end if end is not None and end.size <= MOST_NODES else None for end in (found.low, found.high))
            self._intervals[e] = _Interval(*ends)
        return self._intervals[e]

    def _interval(self, e: Expr) -> _Interval:
        if level(e) is Level.UNIFORM:
            return _Interval(e, e)
        if _needs_extremes(e):
            extreme = self._extreme(e)
            return _Interval(extreme.minimum, extreme.maximum)
        if isinstance(e, Var):
            return {"q_idx": _Interval(Q_FIRST, Q_LAST), "kv_idx": _Interval(KV_FIRST, KV_LAST)}.get(e.name, _UNKNOWN)
        if not isinstance(e, Op) or (e.type is Type.FLOAT and e.op not in _EXACT_FLOAT):
            return _UNKNOWN
        form = linear(e) if e.type is Type.INT else None
        if form is not None:
            return _sum(_sum(_times(form.q, Q_FIRST, Q_LAST), _times(form.kv, KV_FIRST, KV_LAST)), _exactly(form.rest))
        if e.op in expr.ROUNDINGS:
            x = self.interval(e.args[0])
            return _Interval(_map(partial(expr.rounded, e.op), x.low), _map(partial(expr.rounded, e.op), x.high))
        rule = getattr(self, f"_{e.op}", None)
        return rule(*e.args) if rule is not None else _UNKNOWN

    def _add(self, a: Expr, b: Expr) -> _Interval:
        return _sum(self.interval(a), self.interval(b))

    def _sub(self, a: Expr, b: Expr) -> _Interval:
        return _sum(self.interval(a), _mirrored(self.interval(b)))

    def _neg(self, a: Expr) -> _Interval:
        return _mirrored(self.interval(a))

    def _float(self, a: Expr) -> _Interval:
        x = self.interval(a)
        return _Interval(_map(expr.to_float, x.low), _map(expr.to_float, x.high))

    def _mul(self, a: Expr, b: Expr) -> _Interval:
        x, y = self.interval(a), self.interval(b)
        if isinstance(a, expr.Const):
            return _times(int(a.value), y.low, y.high)
        return _hull([_both(expr.mul, s, t) for s in _ends(x) for t in _ends(y)])

    def _min(self, a: Expr, b: Expr) -> _Interval:
        x, y = self.interval(a), self.interval(b)
        return _Interval(_both(expr.minimum, x.low, y.low), _either(expr.minimum, x.high, y.high))

    def _max(self, a: Expr, b: Expr) -> _Interval:
        x, y = self.interval(a), self.interval(b)
        return _Interval(_either(expr.maximum, x.low, y.low), _both(expr.maximum, x.high, y.high))

    def _abs(self, a: Expr) -> _Interval:
        low, high = self.interval(a).low, self.interval(a).high
        zero = expr.const(0.0 if a.type is Type.FLOAT else 0)
        if low is None or high is None:
            return _Interval(zero, None)
        # Chosen, not max(low, -high, 0): see `truth`.
        least = expr.where(
            expr.compare("ge", low, zero), low, expr.where(expr.compare("le", high, zero), expr.neg(high), zero)
        )
        return _Interval(least, expr.where(expr.compare("ge", expr.add(low, high), zero), high, expr.neg(low)))

    def _where(self, test: Expr, a: Expr, b: Expr) -> _Interval:
        condition, x, y = self.truth(test), self.interval(a), self.interval(b)

        def chosen(pick: Callable[[Expr, Expr], Expr], s: Expr | None, t: Expr | None) -> Expr | None:
            if s is None or t is None:
                return None
            return expr.where(condition.must, s, expr.where(condition.may, pick(s, t), t))

        return _Interval(chosen(expr.minimum, x.low, y.low), chosen(expr.maximum, x.high, y.high))

    def _floordiv(self, a: Expr, b: Expr) -> _Interval:
        x = self.interval(a)
        if level(b) is not Level.UNIFORM:
            return _UNKNOWN
        low, high = _map(lambda s: expr.floordiv(s, b), x.low), _map(lambda s: expr.floordiv(s, b), x.high)
        if isinstance(b, expr.Const):
            return _Interval(low, high) if b.value > 0 else _Interval(high, low)
        return _hull([low, high])

    def _mod(self, a: Expr, b: Expr) -> _Interval:
        if level(b) is not Level.UNIFORM:
            return _UNKNOWN
        least, most = expr.minimum(expr.add(b, const(1)), const(0)), expr.maximum(expr.sub(b, const(1)), const(0))
        x, form = self.interval(a), linear(a)
        sweeps = form is not None and 1 in (abs(form.q), abs(form.kv))
        if x.low is None or x.high is None or (sweeps and isinstance(b, expr.Const) and abs(b.value) <= LEAST_BLOCK):
            return _Interval(least, most)
        # Within one period the residues ascend.
        one_period = expr.compare("eq", expr.floordiv(x.low, b), expr.floordiv(x.high, b))
        low = expr.where(one_period, expr.mod(x.low, b), least)
        return _Interval(low, expr.where(one_period, expr.mod(x.high, b), most))

    def _shl(self, a: Expr, by: Expr) -> _Interval:
        x = self.interval(a)
        if level(by) is not Level.UNIFORM:
            return _UNKNOWN
        return _Interval(_map(lambda s: expr.shift_left(s, by), x.low), _map(lambda s: expr.shift_left(s, by), x.high))

    def _shr(self, a: Expr, by: Expr) -> _Interval:
        x = self.interval(a)
        if level(by) is not Level.UNIFORM:
            return _UNKNOWN
        return _Interval(
            _map(lambda s: expr.shift_right(s, by), x.low), _map(lambda s: expr.shift_right(s, by), x.high)
        )

    def _bitand(self, a: Expr, b: Expr) -> _Interval:
        product = expr.as_product(Op(Type.INT, "bitand", (a, b)))
        if isinstance(product, Op) and product.op != "bitand":
            return self.interval(product)
        for x, y in ((a, b), (b, a)):
            size = int(y.value) + 1 if isinstance(y, expr.Const) else 0
            if 0 < size <= 1 << expr.LAST_SHIFT and size & (size - 1) == 0:
                return self._mod(x, const(size))
        return _common_bits(self.interval(a), self.interval(b))

    def _bitor(self, a: Expr, b: Expr) -> _Interval:
        return _any_bits(self.interval(a), self.interval(b))

    def _bitxor(self, a: Expr, b: Expr) -> _Interval:
        x, y = self.interval(a), self.interval(b)
        return _sum(_any_bits(x, y), _mirrored(_common_bits(x, y)))

    def _extreme(self, e: Expr) -> Extreme:
        if e not in self.reads:
            side = "q" if level(e) is Level.QUERY else "kv"
            tensor = next(x.tensor for x in expr.loads(e) if level(x) is not Level.UNIFORM)
            taken = {x.minimum.name for x in self.reads.values()}
            stem, n = f"{tensor}_{side}", 2
            while f"{stem}_min" in taken:
                stem, n = f"{tensor}_{side}_{n}", n + 1
            kind = Type.FLOAT if e.type is Type.FLOAT else Type.INT
            self.reads[e] = Extreme(value=e, minimum=Var(kind, f"{stem}_min"), maximum=Var(kind, f"{stem}_max"))
        return self.reads[e]


def _shortest(parts: list[Expr]) -> list[Expr]:
    """The shortest of several expressions, as many as may be written out together."""
    kept: set[int] = set()
    left = MOST_NODES - 1
    for i in sorted(range(len(parts)), key=lambda i: parts[i].size):
        left -= parts[i].size
        if left >= 0:
            kept.add(i)
    return [part for i, part in enumerate(parts) if i in kept]


def _needs_extremes(e: Expr) -> bool:
    """Whether a value is best reduced element by element: one per query or per key, from a tensor read there."""
    if level(e) not in (Level.QUERY, Level.KEY) or all(level(x) is Level.UNIFORM for x in expr.loads(e)):
        return False
    floats = [node for node in expr.walk(e) if isinstance(node, Op) and node.type is Type.FLOAT]
    return all(node.op in _EXACT_FLOAT for node in floats)


def _positions(e: Expr) -> frozenset[str]:
    return expr.names(e) & (expr.QUERY_NAMES | expr.KEY_NAMES)


def _positive(e: Expr) -> Expr:
    return expr.compare("gt", e, const(0))


def _negated(t: _Truth) -> _Truth:
    return _Truth(expr.logical_not(t.must), expr.logical_not(t.may))


def _unless(op: str, a: Expr | None, b: Expr | None) -> Expr:
    """True unless the comparison holds: a NaN, from inf - inf, proves nothing."""
    return TRUE if a is None or b is None else expr.logical_not(expr.compare(op, a, b))


def _provided(op: str, a: Expr | None, b: Expr | None) -> Expr:
    return FALSE if a is None or b is None else expr.compare(op, a, b)


def _exactly(e: Expr) -> _Interval:
    return _Interval(e, e)


def _map(f: Callable[[Expr], Expr], a: Expr | None) -> Expr | None:
    return None if a is None else f(a)


def _both(f: Callable[[Expr, Expr], Expr], a: Expr | None, b: Expr | None) -> Expr | None:
    """A bound that needs the two others."""
    return None if a is None or b is None else f(a, b)


def _either(f: Callable[[Expr, Expr], Expr], a: Expr | None, b: Expr | None) -> Expr | None:
    """A bound for which one of the two others is enough."""
    return f(a, b) if a is not None and b is not None else (b if a is None else a)


def _sum(x: _Interval, y: _Interval) -> _Interval:
    return _Interval(_both(expr.add, x.low, y.low), _both(expr.add, x.high, y.high))


def _mirrored(x: _Interval) -> _Interval:
    return _Interval(_map(expr.neg, x.high), _map(expr.neg, x.low))


def _common_bits(x: _Interval, y: _Interval) -> _Interval:
    """`x & y`. It is no larger than the larger, no larger than one that is not negative, and negative if both are: then
    the bits it lacks are at most those that the two lack together."""
    if x.low is None or y.low is None or x.high is None or y.high is None:
        return _UNKNOWN
    zero = const(0)
    x_counts, y_counts = expr.compare("ge", x.low, zero), expr.compare("ge", y.low, zero)
    lacking = expr.add(expr.add(expr.minimum(x.low, zero), expr.minimum(y.low, zero)), const(1))
    low = expr.where(expr.logical_or(x_counts, y_counts), zero, expr.minimum(lacking, zero))
    if_counts = expr.where(y_counts, expr.minimum(x.high, y.high), x.high)
    return _Interval(low, expr.where(x_counts, if_counts, expr.where(y_counts, y.high, expr.maximum(x.high, y.high))))


def _any_bits(x: _Interval, y: _Interval) -> _Interval:
    """`x | y`, which is `~(~x & ~y)`."""
    return _complement(_common_bits(_complement(x), _complement(y)))


def _complement(x: _Interval) -> _Interval:
    return _Interval(_map(expr.bit_not, x.high), _map(expr.bit_not, x.low))


def _times(factor: int, low: Expr | None, high: Expr | None) -> _Interval:
    x = _Interval(_map(lambda e: expr.mul(const(factor), e), low), _map(lambda e: expr.mul(const(factor), e), high))
    return x if factor >= 0 else _Interval(x.high, x.low)


def _ends(x: _Interval) -> tuple[Expr | None, ...]:
    return (x.low,) if x.low == x.high else (x.low, x.high)


def _hull(ends: list[Expr | None]) -> _Interval:
    known = [e for e in ends if e is not None]
    if len(known) < len(ends):
        return _UNKNOWN
    low = high = known[0]
    for e in known[1:]:
        low, high = expr.minimum(low, e), expr.maximum(high, e)
    return _Interval(low, high)
