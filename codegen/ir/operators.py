"""Reading of operators: arithmetic, bits, shifts, comparisons and `in`, with the type rules of each."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, Type
from codegen.ir.language import (
    BINARY_OPERATORS,
    BIT_OPERATORS,
    COMPARISON_OPERATORS,
    MOST_MEMBERS,
    SHIFT_OPERATORS,
    Scope,
)
from codegen.ir.syntax import indexing_example, on_one_line, source, type_remedy, with_article
from codegen.util.errors import ExprError


class OperatorReader(ABC):
    """The operator half of the parser. Its other half, `parse.Reader`, defines how names, calls and indices are
    read."""

    def __init__(self, text: str, scope: Scope) -> None:
        self.utf8 = on_one_line(text).encode()
        self.scope = scope

    @abstractmethod
    def read(self, node: ast.expr) -> Expr:
        """The IR of a node."""

    @abstractmethod
    def read_index(self, tensor: str, item: ast.expr, dim: str | int) -> Expr:
        """The IR of an index of a tensor, whose dim there is `dim`."""

    @abstractmethod
    def load(self, name: str, indices: tuple[Expr, ...]) -> Load:
        """An element of a tensor in scope."""

    def fail(
        self,
        node: ast.AST,
        message: str,
        unknown: str = "",
        within: tuple[str, ...] = (),
        *,
        indexed: bool = False,
    ) -> ExprError:
        """An error that points at the column of a node; see `ExprError`."""
        before = self.utf8[: getattr(node, "col_offset", 0)]  # `ast` counts bytes
        column = len(before.decode()) + 1
        return ExprError(message, column, unknown=unknown, within=within, indexed=indexed)

    def number(self, node: ast.expr, op: str) -> Expr:
        """The IR of an operand that must be a number."""
        e = self.read(node)
        if e.type is Type.BOOL:
            raise self.not_a_number(node, op)
        return e

    def not_a_number(self, node: ast.expr, op: str) -> ExprError:
        return self.fail(node, f"'{op}' needs numbers, got the boolean {source(node)!r}; use where(condition, a, b)")

    def boolean(self, node: ast.expr, op: str) -> Expr:
        """The IR of an operand that must be a boolean."""
        e = self.read(node)
        if e.type is not Type.BOOL:
            got = f"{with_article(e.type)}: {source(node)!r}"
            raise self.fail(node, f"'{op}' needs booleans, got {got}; write a comparison")
        return e

    def build(self, node: ast.expr, build: Callable[..., Expr], *args: Any) -> Expr:
        """`build(*args)`; an error if folding its literals gives no finite value, as in `log(0)`."""
        try:
            return build(*args)
        except (ValueError, OverflowError):
            raise self.fail(node, f"{source(node)!r} has no finite value") from None

    def read_unary(self, op: ast.unaryop, operand: ast.expr) -> Expr:
        if isinstance(op, ast.Invert):
            e = self.read(operand)
            if e.type is Type.FLOAT:
                raise self.not_bits(operand, "~")
            return expr.bit_not(e) if e.type is Type.INT else expr.logical_not(e)
        if isinstance(op, ast.Not):
            return expr.logical_not(self.boolean(operand, "not"))
        if isinstance(op, ast.UAdd):
            return self.number(operand, "+")
        if isinstance(operand, ast.Constant) and type(operand.value) is int:
            return expr.const(-operand.value)  # -2**31 fits 32 bits, 2**31 does not
        return expr.neg(self.number(operand, "-"))

    def read_binary(self, node: ast.BinOp, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        if type(op) in BIT_OPERATORS:
            return self.read_bits(op, left, right)
        if type(op) in SHIFT_OPERATORS:
            return self.read_shift(op, left, right)
        if isinstance(op, ast.Pow):
            return self.read_power(node, left, right)
        if type(op) not in BINARY_OPERATORS:
            tables = (BINARY_OPERATORS, BIT_OPERATORS, SHIFT_OPERATORS)
            symbols = [entry[0] for table in tables for entry in table.values()]
            operators = " ".join([*symbols, "**"])
            raise self.fail(
                node,
                f"{source(node)!r} uses an operator that is not part of the expression language; it has {operators}",
            )
        symbol, build = BINARY_OPERATORS[type(op)]
        a, b = self.number(left, symbol), self.number(right, symbol)
        if symbol in ("//", "%"):
            for side, e in ((left, a), (right, b)):
                if e.type is not Type.INT:
                    raise self.fail(side, f"'{symbol}' needs integers, got the float {source(side)!r}; use int(...)")
        if symbol in ("/", "//", "%") and expr.is_const(b, 0):
            raise self.fail(right, f"'{symbol}' divides by the constant zero in {source(node)!r}")
        return build(a, b)

    def read_power(self, node: ast.BinOp, left: ast.expr, right: ast.expr) -> Expr:
        base, exponent = self.number(left, "**"), self.number(right, "**")
        if not isinstance(exponent, expr.Const):
            message = f"the exponent of '**' must be a literal number, got {source(right)!r}; use exp and log"
            raise self.fail(right, message)
        if abs(exponent.value) > expr.MAX_EXPONENT:
            limits = f"from -{expr.MAX_EXPONENT} to {expr.MAX_EXPONENT}"
            raise self.fail(right, f"the exponent of '**' must be {limits}, got {exponent.value}")
        if expr.is_const(base, 0) and exponent.value < 0:
            raise self.fail(node, f"'**' divides by the constant zero in {source(node)!r}")
        if base.type is Type.INT and (exponent.type is not Type.INT or exponent.value < 0):
            base = expr.to_float(base)
        return self.build(node, expr.power, base, exponent.value)

    def read_bits(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        """`& | ^` of two booleans, or bitwise of two integers."""
        symbol, of_booleans, of_integers = BIT_OPERATORS[type(op)]
        a, b = self.read(left), self.read(right)
        if a.type is Type.INT and b.type is Type.INT:
            return of_integers(a, b)
        for refused in (Type.FLOAT, Type.INT):
            for side, e in ((left, a), (right, b)):
                if e.type is refused:
                    raise self.not_bits(side, symbol, refused)
        return of_booleans(a, b)

    def not_bits(self, node: ast.expr, symbol: str, got: Type = Type.FLOAT) -> ExprError:
        # & and | bind tighter than comparisons: `a & b < c` is `(a & b) < c`.
        message = f"'{symbol}' needs booleans, or integers alone, got {with_article(got)}: {source(node)!r}"
        return self.fail(node, f"{message}; put comparisons beside '{symbol}' in parentheses")

    def read_shift(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        symbol, build = SHIFT_OPERATORS[type(op)]
        a, b = self.number(left, symbol), self.number(right, symbol)
        for side, e in ((left, a), (right, b)):
            if e.type is not Type.INT:
                raise self.fail(side, f"'{symbol}' needs integers, got the float {source(side)!r}; use int(...)")
        if isinstance(b, expr.Const) and not 0 <= b.value <= expr.LAST_SHIFT:
            raise self.fail(right, f"'{symbol}' shifts by 0 to {expr.LAST_SHIFT} bits, got {b.value}")
        return build(a, b)

    def is_bare(self, node: ast.expr) -> bool:
        """True if the text of a node has no parentheses of its own around it."""
        before, after = self.utf8[: node.col_offset].rstrip(), self.utf8[node.end_col_offset :].lstrip()
        return not (before.endswith(b"(") and after.startswith(b")"))

    def read_compare(self, node: ast.Compare) -> Expr:
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and len(node.ops) == 1:
            found = self.read_membership(node.left, node.comparators[0])
            return found if isinstance(node.ops[0], ast.In) else expr.logical_not(found)
        if not all(type(op) in COMPARISON_OPERATORS for op in node.ops):
            raise self.fail(node, f"{source(node)!r}: only < <= > >= == != compare values, and one 'in' alone")
        symbols = [COMPARISON_OPERATORS[type(op)][0] for op in node.ops]
        sides = [node.left, *node.comparators]
        values = [self.read(side) for side in sides]
        for side, e in zip(sides, values, strict=True):
            if not isinstance(side, ast.BinOp) or e.type is not Type.INT:
                continue
            if type(side.op) in BIT_OPERATORS and self.is_bare(side):
                # A common mistake: `a < b & c < d` is `a < (b & c) < d`.
                symbol = BIT_OPERATORS[type(side.op)][0]
                message = f"'{symbol}' binds tighter than the comparison beside it: {source(side)!r}"
                raise self.fail(side, f"{message}; put the booleans, or the integers, that it joins in parentheses")
        if not (set(symbols) <= {"==", "!="} and {e.type for e in values} == {Type.BOOL}):
            for side, e, symbol in zip(sides, values, [symbols[0], *symbols], strict=True):
                if e.type is Type.BOOL:
                    raise self.not_a_number(side, symbol)
        pairs = zip(node.ops, values, values[1:], strict=False)
        return expr.logical_and(*(expr.compare(COMPARISON_OPERATORS[type(op)][1], a, b) for op, a, b in pairs))

    def read_membership(self, node: ast.expr, members: ast.expr) -> Expr:
        """`x in (1, 2, 3)`, or `x in tensor[b]`, which searches the last dim of a tensor."""
        member = self.read(node)
        if member.type is not Type.INT:
            remedy = type_remedy(member.type, Type.INT)
            raise self.fail(node, f"'in' needs an integer, got {with_article(member.type)}: {source(node)!r}{remedy}")
        return expr.logical_or(*(expr.compare("eq", member, e) for e in self.read_members(members)))

    def read_members(self, node: ast.expr) -> list[Expr]:
        """The integers on the right of `in`."""
        if isinstance(node, (ast.Tuple, ast.List)):
            found = [self.read(element) for element in node.elts]
            for element, e in zip(node.elts, found, strict=True):
                if e.type is not Type.INT:
                    raise self.fail(element, f"'in' needs integers, got {with_article(e.type)}: {source(element)!r}")
            return found
        name, index = (node.value, node.slice) if isinstance(node, ast.Subscript) else (node, None)
        if not (isinstance(name, ast.Name) and name.id in self.scope.tensors):
            raise self.fail(node, f"'in' needs a list of integers or a tensor that holds one, got {source(node)!r}")
        tensor = self.scope.tensors[name.id]
        last = tensor.dims[-1] if tensor.dims else None
        if not isinstance(last, int) or last > MOST_MEMBERS or tensor.element is not Type.INT:
            got = f"dims [{', '.join(map(str, tensor.dims))}] of {tensor.dtype}"
            rule = f"of integers whose last dim, the list, is an integer up to {MOST_MEMBERS}"
            raise self.fail(node, f"'in' needs a tensor {rule}; '{name.id}' has {got}")
        items = [] if index is None else index.elts if isinstance(index, ast.Tuple) else [index]
        if len(items) != len(tensor.dims) - 1:
            wanted = indexing_example(name.id, tensor.dims[:-1]) if len(tensor.dims) > 1 else name.id
            message = f"'in' takes the last dim of '{name.id}' as its list: index the {len(tensor.dims) - 1} before it"
            raise self.fail(node, f"{message}, {wanted}; got {len(items)}")
        dims = zip(items, tensor.dims[:-1], strict=True)
        indices = tuple(self.read_index(name.id, item, dim) for item, dim in dims)
        return [self.load(name.id, (*indices, expr.const(i))) for i in range(last)]
