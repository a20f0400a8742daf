"""Translates operators on tensors to the expression language, which is stricter about kinds of numbers than torch."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from codegen.port.values import (
    Captured,
    Constant,
    Failed,
    ForeignError,
    Kind,
    Library,
    Several,
    Symbol,
    TranslationError,
    Undecided,
    Value,
    literal,
)

_FOLDED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
MOST_EXPONENT = 1024
"""Powers and shifts of constants with a larger exponent or distance are not computed."""

_ANNOTATED = {"int": Kind.INT, "float": Kind.FLOAT}


def call(name: str, *arguments: ast.expr) -> ast.Call:
    """A call of a function of the language."""
    return ast.Call(ast.Name(name), list(arguments), [])


def no_number(value: Value) -> str:
    """Why a constant that is used as a number is none."""
    assert isinstance(value, Constant)
    if value.value is None and value.not_given:
        return f"argument {value.not_given} has the default None; port a `partial` of the function that gives it"
    if value.value is None and value.default_of:
        return f"argument {value.default_of} has the default None; port a call of the factory that gives it"
    return f"{value.value!r} is no number"


class Arithmetic:
    """Builds expressions. `guesses`: captured name -> the kind that its uses require, filled while expressions are
    built; `seen`: the captured names that an expression reads. Both have the keys of captured values."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        self.guesses = guesses
        self.seen: dict[str, Captured] = {}

    def is_given(self, value: Value) -> bool:
        """True for a value that may be None and is taken for another value."""
        raise NotImplementedError

    def symbol(self, value: Value, node: ast.AST) -> Symbol:
        """A value as an expression."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, Constant):
            made = literal(value.value)
            if made is None:
                raise TranslationError(node, no_number(value))
            kinds = {bool: Kind.BOOL, int: Kind.INT}
            return Symbol(made, kinds.get(type(value.value), Kind.FLOAT))
        if isinstance(value, Captured):
            return self._captured(value, node)
        if isinstance(value, Failed):
            raise TranslationError(None)
        if isinstance(value, Undecided):
            raise TranslationError(node, value.reason)
        if isinstance(value, Library) and value.not_read:
            raise ForeignError(node, value.not_read)
        raise TranslationError(node, "it is no number of the expression language")

    def _captured(self, value: Captured, node: ast.AST) -> Symbol:
        key = value.key
        if key in self.seen and value.may_differ(self.seen[key]):
            reason = f"'{value.path}' has several values here that this file does not give; give each a name of its own"
            raise TranslationError(node, reason)
        if value.made_by is not None or key not in self.seen:
            self.seen[key] = value
        kind = self.guesses.get(key, Kind.UNKNOWN)
        made: ast.expr = ast.Name(key)
        if value.indices:
            indices = list(value.indices)
            made = ast.Subscript(made, indices[0] if len(indices) == 1 else ast.Tuple(indices))
        elif value.annotation == "bool":
            raise TranslationError(node, f"'{value.name}' is a flag without a value in this file; write it there")
        elif value.annotation in _ANNOTATED:
            self.guesses.setdefault(key, _ANNOTATED[value.annotation])
            kind = self.guesses[key]
        elif "Callable" in value.annotation or value.annotation.endswith("signature"):
            raise TranslationError(node, f"'{value.name}' is a function that only a call of the factory gives")
        return Symbol(made, kind, frozenset([key]) if kind is Kind.UNKNOWN else frozenset())

    def guess(self, symbol: Symbol, kind: Kind) -> Symbol:
        """The symbol with a kind, which is also recorded as the guess for its captured names."""
        for name in symbol.undecided:
            self.guesses.setdefault(name, kind)
        return Symbol(symbol.node, kind) if symbol.kind is Kind.UNKNOWN else symbol

    def number(self, value: Value, node: ast.AST) -> Symbol:
        """A value where torch takes a number: a boolean counts as 0 or 1."""
        symbol = self.symbol(value, node)
        if symbol.kind is Kind.BOOL:
            return Symbol(call("where", symbol.node, ast.Constant(1), ast.Constant(0)), Kind.INT)
        return symbol

    def integer(self, value: Value, node: ast.AST, what: str) -> Symbol:
        """A value that must be an integer."""
        symbol = self.guess(self.number(value, node), Kind.INT)
        if symbol.kind is Kind.FLOAT:
            raise TranslationError(node, f"{what} must be an integer, and this is a float")
        return symbol

    def boolean(self, value: Value, node: ast.AST) -> Symbol:
        """A value where torch takes a condition: a number counts as true unless it is 0."""
        if isinstance(value, Constant) and isinstance(value.value, bool | int | float):
            return Symbol(ast.Constant(bool(value.value)), Kind.BOOL)
        symbol = self.guess(self.symbol(value, node), Kind.BOOL)
        if symbol.kind is Kind.BOOL:
            return symbol
        return Symbol(ast.Compare(symbol.node, [ast.NotEq()], [ast.Constant(0)]), Kind.BOOL)

    # -------------------------------------------------------------------------------------------------------- operators

    def binary(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        """`left op right`."""
        folded = self._folded(op, left, right, node)
        if folded is not None:
            return folded
        if isinstance(op, ast.BitAnd | ast.BitOr | ast.BitXor):
            return self._bits(op, left, right, node)
        if isinstance(op, ast.Pow):
            return self._power(left, right, node)
        if isinstance(op, ast.MatMult):
            raise TranslationError(node, "a score is made of one pair's numbers, so there is no matrix product")
        if isinstance(op, ast.Add | ast.Mult):
            either = [self.symbol(value, node) for value in (left, right)]
            if {each.kind for each in either} == {Kind.BOOL}:  # the sum and product of booleans are booleans in torch
                return logical(isinstance(op, ast.Mult), either)
        a, b = self.number(left, node), self.number(right, node)
        if isinstance(op, ast.FloorDiv | ast.Mod) and Kind.FLOAT in (a.kind, b.kind):
            return self._float_division(op, a, b)
        if isinstance(op, ast.FloorDiv | ast.Mod | ast.LShift | ast.RShift):
            a, b = self.guess(a, Kind.INT), self.guess(b, Kind.INT)
        if isinstance(op, ast.Mult):
            a, b = _multiplied_as_floats(a, b)
        made = ast.BinOp(a.node, op, b.node)
        return Symbol(made, Kind.FLOAT) if isinstance(op, ast.Div) else self.joined(made, a, b)

    def joined(self, made: ast.expr, *parts: Symbol) -> Symbol:
        """An expression whose kind follows from its parts' kinds. Combined with a float, a captured name is a float."""
        kinds = {part.kind for part in parts}
        if Kind.FLOAT in kinds:
            is_literal = all(isinstance(p.node, ast.Constant | ast.UnaryOp) for p in parts if p.kind is Kind.FLOAT)
            for part in () if is_literal else parts:  # 0.5 * length[b] says nothing about length
                self.guess(part, Kind.FLOAT)
            is_converted = all(part.kind is Kind.INT or part.is_converted for part in parts)
            return Symbol(made, Kind.FLOAT, is_converted=is_converted)
        if Kind.UNKNOWN in kinds:
            return Symbol(made, Kind.UNKNOWN, frozenset().union(*(part.undecided for part in parts)))
        return Symbol(made, Kind.INT)

    def _folded(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Constant | None:
        if not (isinstance(left, Constant) and isinstance(right, Constant) and type(op) in _FOLDED):
            return None
        a, b = left.value, right.value
        for value in (left, right):
            if not isinstance(value.value, int | float):
                raise TranslationError(node, no_number(value))
        assert isinstance(a, int | float)
        assert isinstance(b, int | float)
        try:
            if isinstance(op, ast.Pow | ast.LShift) and abs(b) > MOST_EXPONENT:
                raise OverflowError
            return Constant(_FOLDED[type(op)](a, b))
        except (ArithmeticError, TypeError, ValueError):
            raise TranslationError(node, "these constants have no finite value") from None

    def _float_division(self, op: ast.operator, a: Symbol, b: Symbol) -> Symbol:
        whole = call("floor", ast.BinOp(a.node, ast.Div(), b.node))
        if isinstance(op, ast.FloorDiv):
            return Symbol(whole, Kind.FLOAT)
        return Symbol(ast.BinOp(a.node, ast.Sub(), ast.BinOp(b.node, ast.Mult(), whole)), Kind.FLOAT)

    def _bits(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Symbol:
        a, b = self.symbol(left, node), self.symbol(right, node)
        if Kind.BOOL not in (a.kind, b.kind) and Kind.INT in (a.kind, b.kind):
            a, b = self.integer(left, node, "a bit operation's operand"), self.integer(right, node, "its operand")
            return Symbol(ast.BinOp(a.node, op, b.node), Kind.INT)
        a, b = self.boolean(left, node), self.boolean(right, node)
        if isinstance(op, ast.BitXor):
            return Symbol(ast.Compare(a.node, [ast.NotEq()], [b.node]), Kind.BOOL)
        return logical(isinstance(op, ast.BitAnd), [a, b])

    def power(self, base: Symbol, exponent: ast.expr) -> Symbol:
        """A power with a literal exponent."""
        base = _as_float(base) if base.is_converted else base
        return self.joined(ast.BinOp(base.node, ast.Pow(), exponent), base)

    def _power(self, left: Value, right: Value, node: ast.AST) -> Symbol:
        base = self.number(left, node)
        if isinstance(right, Constant):
            return self.power(base, self.number(right, node).node)
        power = self.number(right, node)
        exponent = power.node
        if not (isinstance(left, Constant) and isinstance(left.value, int | float) and left.value > 0):
            raise TranslationError(node, "of a power either the exponent or a positive base must be a constant")
        if type(left.value) is int and left.value == 2 and power.kind is Kind.INT:
            # An integer in torch, too: 0 if the exponent is negative.
            zero, one = ast.Constant(0), ast.Constant(1)
            is_index = isinstance(exponent, ast.Name)  # a position, or an index of batch or head: never negative
            shifted = ast.BinOp(one, ast.LShift(), exponent if is_index else call("max", exponent, zero))
            negative = ast.Compare(exponent, [ast.Lt()], [zero])
            return Symbol(shifted if is_index else call("where", negative, zero, shifted), Kind.INT)
        if left.value != 2:
            exponent = ast.BinOp(ast.Constant(math.log2(left.value)), ast.Mult(), exponent)
        return Symbol(call("exp2", exponent), Kind.FLOAT)

    def unary(self, op: ast.unaryop, operand: Value, node: ast.AST) -> Value:
        """`op operand`."""
        if isinstance(op, ast.Not):
            if isinstance(operand, Constant):
                return Constant(not operand.value)
            return Symbol(ast.UnaryOp(ast.Not(), self.boolean(operand, node).node), Kind.BOOL)
        if isinstance(operand, Constant) and isinstance(operand.value, int | float):
            if isinstance(op, ast.Invert):
                if isinstance(operand.value, int):
                    return Constant(not operand.value if isinstance(operand.value, bool) else ~operand.value)
                raise TranslationError(node, "'~' needs a boolean or an integer")
            return Constant(-operand.value if isinstance(op, ast.USub) else +operand.value)
        if isinstance(op, ast.Invert):
            symbol = self.symbol(operand, node)
            if symbol.kind is Kind.INT:
                return Symbol(ast.UnaryOp(op, symbol.node), Kind.INT)
            return Symbol(ast.UnaryOp(ast.Not(), self.boolean(symbol, node).node), Kind.BOOL)
        symbol = self.number(operand, node)
        return self.joined(ast.UnaryOp(op, symbol.node), symbol) if isinstance(op, ast.USub) else symbol

    def compare(self, ops: Sequence[ast.cmpop], values: Sequence[Value], node: ast.AST) -> Value:
        """`a < b`, or a chain of comparisons."""
        known = [value.value for value in values if isinstance(value, Constant)]
        if len(known) == len(values) and all(type(op) in _COMPARED for op in ops):
            try:
                pairs = zip(ops, known, known[1:], strict=False)
                return Constant(all(_COMPARED[type(op)](a, b) for op, a, b in pairs))
            except TypeError:
                nothing = [value for value in values if value == Constant(None)]
                reason = no_number(nothing[0]) if nothing else "these constants cannot be compared"
                raise TranslationError(node, reason) from None
        if len(ops) == 1 and isinstance(ops[0], ast.Is | ast.IsNot) and Constant(None) in values:
            other = next(value for value in values if value != Constant(None))
            if isinstance(other, Symbol) or self.is_given(other):
                return Constant(isinstance(ops[0], ast.IsNot))
            raise TranslationError(node, "whether it is None is not known in this file")
        if len(ops) == 1 and isinstance(ops[0], ast.In | ast.NotIn) and isinstance(values[1], Several):
            found = [self.compare([ast.Eq()], [values[0], item], node) for item in values[1].items]
            if all(isinstance(one, Constant) for one in found):
                is_in = Constant(True) in found
                return Constant(is_in is isinstance(ops[0], ast.In))
            raise TranslationError(node, "'in' asks for the value of a tensor; write a == b or a == c with |")
        if not all(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq | ast.NotEq) for op in ops):
            raise TranslationError(node, "only < <= > >= == != compare numbers")
        symbols = [self.symbol(value, node) for value in values]
        if len(symbols) == 2 and isinstance(ops[0], ast.Eq | ast.NotEq):
            for truth, number in (symbols, symbols[::-1]):  # `(q_idx >= n) == 1`
                value = number.node.value if isinstance(number.node, ast.Constant) else None
                if truth.kind is Kind.BOOL and value in (0, 1):
                    is_same = bool(value) is isinstance(ops[0], ast.Eq)
                    return truth if is_same else Symbol(ast.UnaryOp(ast.Not(), truth.node), Kind.BOOL)
        if {symbol.kind for symbol in symbols} != {Kind.BOOL}:
            symbols = [self.number(symbol, node) for symbol in symbols]
        is_equality = all(isinstance(op, ast.Eq | ast.NotEq) for op in ops)
        if Kind.FLOAT in {symbol.kind for symbol in symbols}:
            self.joined(ast.Constant(0), *symbols)
        elif is_equality or Kind.INT in {symbol.kind for symbol in symbols}:
            for symbol in symbols:
                self.guess(symbol, Kind.INT)
        nodes = [symbol.node for symbol in symbols]
        return Symbol(ast.Compare(nodes[0], list(ops), nodes[1:]), Kind.BOOL)

    def where(self, condition: Value, a: Value, b: Value, node: ast.AST) -> Value:
        """`torch.where(condition, a, b)`; with a constant condition the chosen one of `a` and `b`."""
        if isinstance(condition, Constant):
            return a if condition.value else b
        test = self.boolean(condition, node)
        first, second = self.symbol(a, node), self.symbol(b, node)
        if {first.kind, second.kind} == {Kind.BOOL}:
            return Symbol(call("where", test.node, first.node, second.node), Kind.BOOL)
        if Kind.BOOL in (first.kind, second.kind) and Kind.UNKNOWN in (first.kind, second.kind):
            first, second = self.guess(first, Kind.BOOL), self.guess(second, Kind.BOOL)
            return Symbol(call("where", test.node, first.node, second.node), Kind.BOOL)
        first, second = self.number(first, node), self.number(second, node)
        return self.joined(call("where", test.node, first.node, second.node), first, second)


def _multiplied_as_floats(a: Symbol, b: Symbol) -> tuple[Symbol, Symbol]:
    """The factors of a product that torch computes in floats although both nodes are integers, whose product in the
    language would have to fit into 32 bits."""
    if not (a.is_converted or b.is_converted):
        return a, b
    if not all(factor.is_converted or factor.kind is Kind.INT for factor in (a, b)):
        return a, b
    return (a, _as_float(b)) if isinstance(b.node, ast.Constant | ast.UnaryOp) else (_as_float(a), b)


def _as_float(x: Symbol) -> Symbol:
    """An integer as a float of the language."""
    match x.node:
        case ast.Constant(value=int(value)):
            return Symbol(ast.Constant(float(value)), Kind.FLOAT)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return Symbol(ast.UnaryOp(ast.USub(), ast.Constant(float(value))), Kind.FLOAT)
    return Symbol(ast.BinOp(ast.Constant(1.0), ast.Mult(), x.node), Kind.FLOAT)


def logical(is_and: bool, parts: Sequence[Symbol]) -> Symbol:
    """`a and b and c`, without constants that decide nothing."""
    nodes: list[ast.expr] = []
    for part in parts:
        node = part.node
        if isinstance(node, ast.Constant):
            if bool(node.value) is not is_and:
                return Symbol(ast.Constant(not is_and), Kind.BOOL)
            continue
        same = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) is is_and
        nodes += node.values if same and isinstance(node, ast.BoolOp) else [node]
    if not nodes:
        return Symbol(ast.Constant(is_and), Kind.BOOL)
    op: ast.boolop = ast.And() if is_and else ast.Or()
    return Symbol(nodes[0] if len(nodes) == 1 else ast.BoolOp(op, nodes), Kind.BOOL)
