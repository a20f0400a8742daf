"""Expressions in the spec's own language, and in plain Python for values that only scalars decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.ir.expr import FLOAT_FUNCTIONS, ROUNDINGS, Expr, Load, Op, Var, without_powers
from codegen.ir.printers.base import ATOM, COMPARE, INFIX, PYTHON_INTEGER, UNARY, Printer

COMPARISONS = tuple(op for op, (_, strength) in INFIX.items() if strength == COMPARE)
BIT_OPERATIONS = ("bitand", "bitor", "bitxor")


@dataclass
class FormulaPrinter(Printer):
    """The expression language, with named expressions written out: for docstrings and error messages.

    `keywords` maps the name of a tensor or scalar to its name in the spec, where the two differ.
    """

    keywords: Mapping[str, str] = field(default_factory=dict)

    def variable(self, e: Var) -> str:
        return self.keywords.get(e.name, e.name)

    def __post_init__(self) -> None:
        self.infix = {**INFIX, **PYTHON_INTEGER}

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op in ("and", "or"):
            strength = 0 if e.op == "and" else -1
            return f" {e.op} ".join(self.operand(a, strength + 1) for a in e.args), strength
        if e.op == "not":
            return (
                f"not {self.operand(e.args[0], UNARY)}",
                COMPARE,
            )  # looser than the comparison it may be an operand of
        if e.op == "float":
            return self._print(e.args[0])
        if e.op in COMPARISONS:
            symbol, strength = self.infix[e.op]
            return f" {symbol} ".join(map(self._compared, e.args)), strength
        return super().operation(e)

    def _compared(self, e: Expr) -> str:
        """A side of a comparison. The language asks for parentheses around operations on bits there."""
        shown = e
        while isinstance(shown, Op) and shown.op == "float":  # which is not printed
            shown = shown.args[0]
        is_of_bits = isinstance(shown, Op) and shown.op in BIT_OPERATIONS
        return f"({self.text(e)})" if is_of_bits else self.operand(e, COMPARE + 1)

    def infinity(self, value: float) -> str:
        return repr(value)

    def call(self, e: Op) -> str:
        return f"{e.op}({', '.join(self.text(a) for a in e.args)})"

    def load(self, e: Load) -> str:
        name = self.keywords.get(e.tensor, e.tensor)
        return f"{name}[{', '.join(self.text(i) for i in e.indices)}]" if e.indices else name


@dataclass
class NumberPrinter(FormulaPrinter):
    """Plain Python for an expression of scalars and literals only: torch's functions take no Python numbers.

    Functions of floats are those of the runtime's `scalar_math`, because Python raises an error where kernels compute
    infinity or NaN. `reads` gets that name if the source has it.
    """

    reads: set[str] = field(default_factory=set)

    def infinity(self, value: float) -> str:
        # The `inf` of the spec's language, which FormulaPrinter prints, is no name of Python.
        return Printer.infinity(self, value)

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op == "not":
            return f"(not {self.operand(e.args[0], UNARY)})", ATOM
        if e.op == "div":
            return self._function("divide", e), ATOM
        if e.op == "pow":
            return self._print(without_powers(e))
        return super().operation(e)

    def call(self, e: Op) -> str:
        if e.op == "where":
            condition, a, b = (self.text(x) for x in e.args)
            return f"({a} if {condition} else {b})"
        if e.op == "relu":
            return f"max({self.text(e.args[0])}, 0.0)"
        if e.op == "clamp":
            x, low, high = (self.text(a) for a in e.args)
            return f"min(max({x}, {low}), {high})"
        if e.op == "int":
            return self._function("integer", e)
        return self._function(e.op, e) if e.op in FLOAT_FUNCTIONS | ROUNDINGS else super().call(e)

    def _function(self, name: str, e: Op) -> str:
        self.reads.add("scalar_math")
        return f"scalar_math.{name}({', '.join(map(self.text, e.args))})"
