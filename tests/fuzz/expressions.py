"""The value of an expression of the language, by walking the entry's own text with `ast` over torch tensors.

Nothing here is shared with the generator. Every name is a number or a vector `[N]` with an element per pair, and a
branch of a condition is evaluated at the pairs that take it alone, so that no other pair's inf or NaN reaches a sum.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

Value = Tensor | bool | int | float

NAMED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "causal": ((), "q_idx >= kv_idx"),
    "window": (("size",), "q_idx - kv_idx < size"),
    "prefix": (("length",), "kv_idx < length"),
    "symmetric_window": (("size",), "q_idx - kv_idx <= size and kv_idx - q_idx <= size"),
    "chunk": (("size",), "q_idx // size == kv_idx // size"),
    "softcap": (("cap",), "cap * tanh(score / cap)"),
}
"""The library's named masks and scores that entries are drawn from, by their definitions in the README."""

ROWS = {"q_idx": "q_row", "kv_idx": "kv_row"}
"""What indexes a dim of tokens: rows, which are positions but where a call gives positions."""


@dataclass(frozen=True, kw_only=True)
class Nudge:
    """A small change of what floats decide, to see how far a rounding of that size moves a result.

    shift: added to one side of each comparison that scores or trained tensors take part in, relative to its size.
    tanh: the relative error of each tanh.
    """

    shift: float = 0.0
    tanh: float = 0.0


STILL = Nudge()

Read = Callable[[str, Sequence[Value], "Pairs"], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What the names of an expression are at N pairs of a query and a key."""

    count: int
    names: Mapping[str, Value]
    dims: Mapping[str, Sequence[str | int]]
    read: Read
    dtype: torch.dtype
    device: torch.device
    nudge: Nudge = STILL

    def take(self, chosen: Tensor) -> Pairs:
        """Some of the pairs."""
        names = {name: x[chosen] if isinstance(x, Tensor) else x for name, x in self.names.items()}
        return replace(self, count=len(chosen), names=names)

    def where(self, **names: Value) -> Pairs:
        return replace(self, names={**self.names, **names})

    def by_row(self) -> Pairs:
        """The same with rows for positions."""
        return self.where(**{name: self.names[row] for name, row in ROWS.items()})


def evaluate(text: str, pairs: Pairs) -> Tensor:
    """The value of `text` at each pair, `[N]`: bool, int64 or `pairs.dtype`."""
    return spread(_value(parsed(text), pairs), pairs)


@cache
def parsed(text: str) -> ast.expr:
    return ast.parse(" ".join(text.split()), mode="eval").body


def spread(x: Value, pairs: Pairs) -> Tensor:
    """A number as a vector."""
    if isinstance(x, Tensor):
        return x.expand(pairs.count)
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else pairs.dtype
    return torch.full((pairs.count,), x, dtype=dtype, device=pairs.device)


def _real(x: Value, pairs: Pairs) -> Value:
    if isinstance(x, Tensor):
        return x if x.dtype == pairs.dtype else x.to(pairs.dtype)
    return float(x)


def _is_float(x: Value) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)


def _promoted(a: Value, b: Value, pairs: Pairs) -> tuple[Value, Value]:
    return (_real(a, pairs), _real(b, pairs)) if _is_float(a) or _is_float(b) else (a, b)


def _value(node: ast.expr, pairs: Pairs) -> Value:
    rule = _RULES.get(type(node))
    assert rule is not None, f"no rule for {ast.unparse(node)}"
    found: Value = rule(node, pairs)
    return found


def _constant(node: ast.Constant, _: Pairs) -> Value:
    assert isinstance(node.value, bool | int | float)
    return node.value


def _name(node: ast.Name, pairs: Pairs) -> Value:
    if node.id in pairs.names:
        return pairs.names[node.id]
    if node.id == "inf":
        return math.inf
    if node.id in NAMED:
        return _named(node.id, [], pairs)
    return pairs.read(node.id, [], pairs)  # a tensor without dims


def _named(name: str, arguments: Sequence[ast.expr], pairs: Pairs) -> Value:
    params, body = NAMED[name]
    given = {param: _value(x, pairs) for param, x in zip(params, arguments, strict=True)}
    return _value(parsed(body), pairs.where(**given))


def _unary(node: ast.UnaryOp, pairs: Pairs) -> Value:
    x = _value(node.operand, pairs)
    if isinstance(node.op, ast.Not | ast.Invert):
        return not x if isinstance(x, bool) else ~x  # type: ignore[operator]
    return -x if isinstance(node.op, ast.USub) else x


def _binary(node: ast.BinOp, pairs: Pairs) -> Value:
    a, b = _value(node.left, pairs), _value(node.right, pairs)
    if isinstance(node.op, ast.LShift | ast.RShift):
        return _shifted(a, b, pairs, left=isinstance(node.op, ast.LShift))
    if type(node.op) in _BITS:
        return _BITS[type(node.op)](a, b)
    if isinstance(node.op, ast.Div):
        return _real(a, pairs) / _real(b, pairs)
    if isinstance(node.op, ast.Pow):
        assert not isinstance(b, Tensor)
        return _real(a, pairs) ** b if isinstance(b, float) or b < 0 else a**b
    a, b = _promoted(a, b, pairs)
    return _ARITHMETIC[type(node.op)](a, b)


def _floor_div(a: Value, b: Value) -> Value:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(torch.as_tensor(a), b, rounding_mode="floor")
    return a // b


def _shifted(a: Value, b: Value, pairs: Pairs, *, left: bool) -> Value:
    """By 0 to 30 bits, in 32 of them."""
    x, by = spread(a, pairs), spread(b, pairs).clamp(0, 30)
    return ((x << by) + 2**31) % 2**32 - 2**31 if left else x >> by


_BITS: Mapping[type, Callable[[Any, Any], Value]] = {
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.BitXor: lambda a, b: a ^ b,
}

_ARITHMETIC: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: _floor_div,
    ast.Mod: lambda a, b: a % b,
}


def _bool(node: ast.BoolOp, pairs: Pairs) -> Value:
    found = spread(_value(node.values[0], pairs), pairs)
    for each in node.values[1:]:
        other = spread(_value(each, pairs), pairs)
        found = found & other if isinstance(node.op, ast.And) else found | other
    return found


def _nudged(a: Value, b: Value, pairs: Pairs) -> Value:
    """`a`, moved where it decides about something that is differentiated."""
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in (a, b))
    if not trained or not pairs.nudge.shift:
        return a
    size = a.detach().abs() if isinstance(a, Tensor) else abs(a)
    return a + pairs.nudge.shift * (1 + size)


_COMPARISONS: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


def _member(node: ast.Compare, pairs: Pairs) -> Value:
    """Whether an integer is in a list: of literals, or the last dim of a tensor."""
    x, members = spread(_value(node.left, pairs), pairs), node.comparators[0]
    found = torch.zeros(pairs.count, dtype=torch.bool, device=pairs.device)
    if isinstance(members, ast.Tuple | ast.List):
        each = [_value(member, pairs) for member in members.elts]
    else:
        name, indices = _indices(members, pairs)
        size = pairs.dims[name][-1]
        assert isinstance(size, int)
        each = [pairs.read(name, [*indices, place], pairs) for place in range(size)]
    for member in each:
        found = found | (x == member)
    return found if isinstance(node.ops[0], ast.In) else ~found


def _compare(node: ast.Compare, pairs: Pairs) -> Value:
    if isinstance(node.ops[0], ast.In | ast.NotIn):
        return _member(node, pairs)
    sides = [_value(each, pairs) for each in (node.left, *node.comparators)]
    found: Value = True
    for a, b, op in zip(sides[:-1], sides[1:], node.ops, strict=True):
        a, b = _promoted(a, b, pairs)
        holds = spread(_COMPARISONS[type(op)](_nudged(a, b, pairs), b), pairs)
        found = holds if found is True else spread(found, pairs) & holds
    return found


def _choice(condition: Value, pairs: Pairs, a: Callable[[Pairs], Value], b: Callable[[Pairs], Value]) -> Value:
    """`a` where the condition holds, else `b`, each evaluated there alone."""
    holds = spread(condition, pairs)
    first, second = holds.nonzero()[:, 0], (~holds).nonzero()[:, 0]
    of_first, of_second = pairs.take(first), pairs.take(second)
    x, y = _promoted(a(of_first), b(of_second), pairs)
    x, y = spread(x, of_first), spread(y, of_second)
    return torch.cat([x, y])[torch.argsort(torch.cat([first, second]))]


def _conditional(node: ast.IfExp, pairs: Pairs) -> Value:
    return _choice(_value(node.test, pairs), pairs, lambda p: _value(node.body, p), lambda p: _value(node.orelse, p))


def _subscript(node: ast.Subscript, pairs: Pairs) -> Value:
    name, indices = _indices(node, pairs)
    return pairs.read(name, indices, pairs)


def _indices(node: ast.expr, pairs: Pairs) -> tuple[str, list[Value]]:
    """The tensor and its indices, of the first dims at least."""
    if isinstance(node, ast.Name):
        return node.id, []
    assert isinstance(node, ast.Subscript)
    assert isinstance(node.value, ast.Name)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    sides = [pairs.by_row() if dim in ROWS else _by_position(pairs) for dim in pairs.dims[node.value.id]]
    return node.value.id, [_value(part, side) for part, side in zip(parts, sides, strict=False)]


def _by_position(pairs: Pairs) -> Pairs:
    return pairs.where(q_idx=pairs.names["q_position"], kv_idx=pairs.names["kv_position"])


def _larger(a: Value, b: Value, pairs: Pairs) -> Value:
    a, b = spread(a, pairs), spread(b, pairs)
    return torch.where(spread(_nudged(a, b, pairs), pairs) > b, a, b)


def _smaller(a: Value, b: Value, pairs: Pairs) -> Value:
    a, b = spread(a, pairs), spread(b, pairs)
    return torch.where(spread(_nudged(a, b, pairs), pairs) < b, a, b)


def _fold(pair: Callable[[Value, Value, Pairs], Value]) -> Callable[..., Value]:
    def folded(pairs: Pairs, first: Value, *rest: Value) -> Value:
        for other in rest:
            first = pair(*_promoted(first, other, pairs), pairs)
        return first

    return folded


def _clamp(pairs: Pairs, x: Value, low: Value, high: Value) -> Value:
    return _fold(_smaller)(pairs, _fold(_larger)(pairs, x, low), high)


def _absolute(pairs: Pairs, x: Value) -> Value:
    if not isinstance(x, Tensor):
        return x if x >= 0 else -x
    if not x.is_floating_point():
        return x.abs()
    return torch.where(spread(_nudged(x, 0.0, pairs), pairs) >= 0, x, -x)


def _integer(pairs: Pairs, x: Value) -> Value:
    """Toward zero. Where a float has a rounding error, one more or less may be right."""
    if not _is_float(x):
        return x
    x = spread(x, pairs).detach()
    return (x + pairs.nudge.shift * (1 + x.abs())).trunc().to(torch.int64)


def _whole(function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    """A whole float, a constant to derivatives. Where what is trained has a rounding error, one more or less may do."""

    def rounded(pairs: Pairs, x: Value) -> Value:
        x = spread(_real(x, pairs), pairs)
        moved = pairs.nudge.shift * (1 + x.abs()) if x.requires_grad else 0.0
        return function((x + moved).detach())

    return rounded


def _smooth(function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    return lambda pairs, x: function(spread(_real(x, pairs), pairs))


def _tanh(pairs: Pairs, x: Value) -> Value:
    return torch.tanh(spread(_real(x, pairs), pairs)) * (1 + pairs.nudge.tanh)


SMOOTH = ("exp", "exp2", "log", "log2", "log1p", "sqrt", "sin", "cos", "tan", "erf", "sigmoid")

_FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "abs": _absolute,
    "min": _fold(_smaller),
    "max": _fold(_larger),
    "clamp": _clamp,
    "relu": lambda pairs, x: _fold(_larger)(pairs, x, 0.0 if _is_float(x) else 0),
    "int": _integer,
    "tanh": _tanh,
    **{name: _smooth(getattr(torch, name)) for name in SMOOTH},
    **{name: _whole(getattr(torch, name)) for name in ("floor", "ceil", "round")},
    "silu": _smooth(lambda x: x * torch.sigmoid(x)),
    "gelu": _smooth(lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))),
}


def _call(node: ast.Call, pairs: Pairs) -> Value:
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    if name in NAMED:
        return _named(name, node.args, pairs)
    if name == "where":
        a, b = node.args[1:]
        return _choice(_value(node.args[0], pairs), pairs, lambda p: _value(a, p), lambda p: _value(b, p))
    return _FUNCTIONS[name](pairs, *(_value(x, pairs) for x in node.args))


_RULES: Mapping[type, Callable[..., Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _bool,
    ast.Compare: _compare,
    ast.IfExp: _conditional,
    ast.Subscript: _subscript,
    ast.Call: _call,
}
