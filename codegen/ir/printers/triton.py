"""Expressions as Triton source.

The printer knows the shape of each value: one number, a vector over query rows or keys, or a tile. A vector is
broadcast where it meets a tile, never earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from codegen.ir.expr import (
    COMPARISONS,
    FLOAT_FUNCTIONS,
    ROUNDINGS,
    Expr,
    Level,
    Load,
    Op,
    Type,
    Var,
    level,
    names,
    walk,
)
from codegen.ir.printers.base import AND, ATOM, COMPARE, OR, SUM, Printer

TRITON_HELPERS = {"floordiv": "floor_div", "mod": "floor_mod", "round": "round_even", "log1p": "log1p", "tan": "tan"}
"""Operation -> the helper that a kernel file defines if it uses the operation. `tanh` has a helper too."""

TRITON_FUNCTIONS = {
    **{name: f"tl.{name}" for name in (*sorted((FLOAT_FUNCTIONS | ROUNDINGS) - {"tanh"}), "abs", "where")},
    "min": "tl.minimum",
    "max": "tl.maximum",
    **TRITON_HELPERS,
}


WIDE_INDICES = ("b", "h", "hkv")
"""Index names that kernels hold in 64 bits, because offsets are computed from them. Their values are printed as 32
bits, like positions: a 64-bit loop bound could not be a coordinate of a TMA copy."""


@dataclass
class TritonPrinter(Printer):
    """Triton source.

    `query_axis` is the axis of query rows in a tile: 0 in the forward and dq, 1 in dkdv, whose tiles are transposed.
    `named` maps a subexpression to the local variable that already holds it. `vectors` are names of vectors that
    `level` takes for uniform: the extremes of several blocks.
    """

    query_axis: int = 0
    vectors: frozenset[str] = frozenset()
    named: dict[Expr, str] = field(default_factory=dict)
    in_tile: bool = False
    address: Callable[[Load, TritonPrinter], str] = lambda e, p: ""

    def __post_init__(self) -> None:
        self.functions = TRITON_FUNCTIONS

    def shaped(self, e: Expr, *, tile: bool) -> str:
        """The text of `e` with the shape of a tile, or with its own shape."""
        outer, self.in_tile = self.in_tile, tile
        try:
            return self._condition(e, 0) if self._compares_numbers(e) else self.text(e)
        finally:
            self.in_tile = outer

    def _print(self, e: Expr) -> tuple[str, int]:
        own = level(e)
        if self.in_tile and own in (Level.QUERY, Level.KEY):
            self.in_tile = False
            vector = self.operand(e, ATOM)
            self.in_tile = True
            leading = (own is Level.QUERY) == (self.query_axis == 0)
            return f"{vector}{'[:, None]' if leading else '[None, :]'}", ATOM
        if e in self.named:
            return self.named[e], ATOM
        if isinstance(e, Var) and e.name in WIDE_INDICES:
            return f"{e.name}.to(tl.int32)", ATOM
        return super()._print(e)

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op == "not" and level(e) is Level.UNIFORM:
            # In Triton's interpreter a comparison of scalars is a Python bool, and `~` of that is an integer.
            return f"{self.operand(e.args[0], SUM)} == 0", COMPARE
        if e.op in ("and", "or") and any(map(self._compares_numbers, e.args)):
            symbol, strength = ("&", AND) if e.op == "and" else ("|", OR)
            return f" {symbol} ".join(self._condition(a, strength + 1) for a in e.args), strength
        if e.op == "where" and any(map(self._compares_numbers, e.args[1:])):
            return f"tl.where({', '.join(self._condition(a, 0) for a in e.args)})", ATOM
        return super().operation(e)

    def _condition(self, e: Expr, strength: int) -> str:
        """A boolean operand. Where it becomes a tile, Triton's interpreter takes a comparison of two floats for a
        float; `!= 0` makes it an integer."""
        if not self._compares_numbers(e):
            return self.operand(e, strength)
        text = f"{self.operand(e, SUM)} != 0"
        return text if strength <= COMPARE else f"({text})"

    def call(self, e: Op) -> str:
        if e.op == "float":
            return f"{self.operand(e.args[0], ATOM)}.to(tl.float32)"
        if e.op == "int":
            # In Triton's interpreter a scalar is a plain number, which has no `.to`.
            return f"tl.cast({self.text(e.args[0])}, tl.int32)"
        if e.op == "tanh":
            return f"tanh({self.text(e.args[0])}, HARDWARE_TANH)"
        if e.op == "relu":
            return f"tl.maximum({self.text(e.args[0])}, 0.0)"
        if e.op == "clamp":
            x, low, high = (self.text(a) for a in e.args)
            return f"tl.minimum(tl.maximum({x}, {low}), {high})"
        return super().call(e)

    def load(self, e: Load) -> str:
        return self.address(e, self)

    def _compares_numbers(self, e: Expr) -> bool:
        """True for a boolean that is uniform in the program and contains a comparison of floats."""
        if not isinstance(e, Op) or e.type is not Type.BOOL or e.op in ("and", "or", "not"):
            return False
        if level(e) is not Level.UNIFORM or self.vectors & names(e):
            return False
        return any(isinstance(n, Op) and n.op in COMPARISONS and n.args[0].type is Type.FLOAT for n in walk(e))
