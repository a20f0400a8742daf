"""Expressions in the spec's own language, and in plain Python for values that only scalars decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.ir.expr import FLOAT_FUNCTIONS, ROUNDINGS, Load, Op, Var
from codegen.ir.printers.base import ATOM, COMPARE, INFIX, PRODUCT, PYTHON_INTEGER, UNARY, Printer


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
        return super().operation(e)

    def infinity(self, value: float) -> str:
        return repr(value)

    def call(self, e: Op) -> str:
        return f"{e.op}({', '.join(self.text(a) for a in e.args)})"

    def load(self, e: Load) -> str:
        name = self.keywords.get(e.tensor, e.tensor)
        return f"{name}[{', '.join(self.text(i) for i in e.indices)}]" if e.indices else name


@dataclass
class NumberPrinter(FormulaPrinter):
    """Plain Python for an expression of scalars and literals only: torch's functions take no Python numbers."""

    def infinity(self, value: float) -> str:
        return "math.inf" if value > 0 else "-math.inf"

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op == "not":
            return f"(not {self.operand(e.args[0], UNARY)})", ATOM
        return super().operation(e)

    def call(self, e: Op) -> str:
        if e.op == "where":
            condition, a, b = (self.text(x) for x in e.args)
            return f"({a} if {condition} else {b})"
        if e.op == "sigmoid":
            return f"(0.5 + 0.5 * math.tanh(0.5 * {self.operand(e.args[0], PRODUCT)}))"
        if e.op == "relu":
            return f"max({self.text(e.args[0])}, 0.0)"
        if e.op == "clamp":
            x, low, high = (self.text(a) for a in e.args)
            return f"min(max({x}, {low}), {high})"
        if e.op in ROUNDINGS:
            return f"float({'' if e.op == 'round' else 'math.'}{super().call(e)})"
        return f"math.{super().call(e)}" if e.op in FLOAT_FUNCTIONS else super().call(e)
