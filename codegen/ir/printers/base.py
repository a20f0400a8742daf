"""The walk that all printers share, and the binding strength of operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.ir.expr import Const, Expr, Load, Op, Var

# Binding strength of Python's operators, loosest first.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(1, 10)

INFIX = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "bitor": ("|", OR),
    "bitxor": ("^", XOR),
    "bitand": ("&", AND),
    "shl": ("<<", SHIFT),
    "shr": (">>", SHIFT),
}
"""Operation -> its operator and binding strength, where all dialects spell it alike."""

PYTHON_INTEGER = {"floordiv": ("//", PRODUCT), "mod": ("%", PRODUCT)}
"""Operators of Python, torch and jnp. Triton's round toward zero: there these two are helper functions."""


@dataclass
class Printer:
    """Base of all printers; a dialect supplies the names of functions and the text of loads."""

    functions: Mapping[str, str] = field(default_factory=dict)
    infix: Mapping[str, tuple[str, int]] = field(default_factory=lambda: dict(INFIX))

    def text(self, e: Expr) -> str:
        """The expression as source."""
        return self._print(e)[0]

    def _print(self, e: Expr) -> tuple[str, int]:
        if isinstance(e, Const):
            text = self.infinity(e.value) if abs(e.value) == math.inf else repr(e.value)
            return text, ATOM if e.value >= 0 else UNARY
        if isinstance(e, Var):
            return self.variable(e), ATOM
        if isinstance(e, Load):
            return self.load(e), ATOM
        assert isinstance(e, Op)
        return self.operation(e)

    def infinity(self, value: float) -> str:
        """The text of inf or -inf."""
        return f'float("{value}")'

    def variable(self, e: Var) -> str:
        """The text of a variable."""
        return e.name

    def load(self, e: Load) -> str:
        """The text of a tensor element."""
        raise NotImplementedError

    def operand(self, e: Expr, strength: int) -> str:
        """A subexpression, in parentheses if it binds looser than `strength`."""
        text, own = self._print(e)
        return text if own >= strength else f"({text})"

    def operation(self, e: Op) -> tuple[str, int]:
        """The text of an operation and its binding strength."""
        if e.op in self.infix:
            symbol, strength = self.infix[e.op]
            # A left operand of equal strength needs no parentheses, unless both are comparisons: they would chain.
            left = self.operand(e.args[0], strength + (strength == COMPARE))
            return f"{left} {symbol} {self.operand(e.args[1], strength + 1)}", strength
        if e.op in ("and", "or"):
            symbol, strength = ("&", AND) if e.op == "and" else ("|", OR)
            return f" {symbol} ".join(self.operand(a, strength + 1) for a in e.args), strength
        if e.op == "not":
            return f"~{self.operand(e.args[0], UNARY)}", UNARY
        if e.op == "neg":
            return f"-{self.operand(e.args[0], UNARY)}", UNARY
        if e.op == "pow":
            return f"{self.operand(e.args[0], ATOM)} ** {self.text(e.args[1])}", UNARY
        return self.call(e), ATOM

    def call(self, e: Op) -> str:
        """The text of an operation that is written as a function call."""
        return f"{self.functions[e.op]}({', '.join(self.text(a) for a in e.args)})"
