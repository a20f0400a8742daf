"""IR to source text of plain broadcasting mathematics: torch, jnp, and the expression language itself.

Kernels are printed from the typed statements that `plan.lower` makes of expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from codegen.ir.expr import (
    FLOAT_FUNCTIONS,
    ROUNDINGS,
    Const,
    Expr,
    Load,
    Op,
    Type,
    Var,
    compare,
    loads,
    logical_or,
    names,
)

# Binding strength of Python's operators, loosest first.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(1, 10)

_INFIX = {
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


_PYTHON_INTEGER = {"floordiv": ("//", PRODUCT), "mod": ("%", PRODUCT)}


@dataclass
class Printer:
    """Shared walk over the tree; a dialect fills in function names and loads."""

    functions: Mapping[str, str] = field(default_factory=dict)
    infix: Mapping[str, tuple[str, int]] = field(default_factory=lambda: dict(_INFIX))

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
        return f'float("{value}")'

    def variable(self, e: Var) -> str:
        return e.name

    def load(self, e: Load) -> str:
        raise NotImplementedError

    def operand(self, e: Expr, strength: int) -> str:
        """A subexpression, in parentheses if it binds looser than `strength`."""
        text, own = self._print(e)
        return text if own >= strength else f"({text})"

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op in self.infix:
            symbol, strength = self.infix[e.op]
            # Only sums and products of the left operand may go without parentheses: comparisons do not chain.
            left = self.operand(e.args[0], strength + (strength == COMPARE))
            return f"{left} {symbol} {self.operand(e.args[1], strength + 1)}", strength
        if e.op in ("and", "or"):
            symbol, strength = ("&", AND) if e.op == "and" else ("|", OR)
            return f" {symbol} ".join(self.operand(a, strength + 1) for a in e.args), strength
        if e.op == "not":
            return f"~{self.operand(e.args[0], UNARY)}", UNARY
        if e.op == "neg":
            return f"-{self.operand(e.args[0], UNARY)}", UNARY
        return self.call(e), ATOM

    def call(self, e: Op) -> str:
        return f"{self.functions[e.op]}({', '.join(self.text(a) for a in e.args)})"


@dataclass
class FormulaPrinter(Printer):
    """The expression language itself, named expressions written out: for docstrings and error messages.

    `keywords`: what tensors and scalars are called in a spec, where they have another name.
    """

    keywords: Mapping[str, str] = field(default_factory=dict)

    def variable(self, e: Var) -> str:
        return self.keywords.get(e.name, e.name)

    def __post_init__(self) -> None:
        self.infix = {**_INFIX, **_PYTHON_INTEGER}

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op in ("and", "or"):
            strength = 0 if e.op == "and" else -1
            return f" {e.op} ".join(self.operand(a, strength + 1) for a in e.args), strength
        if e.op == "not":
            return f"not {self.operand(e.args[0], UNARY)}", COMPARE  # it binds looser than the comparison it may be in
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
    """Plain Python, for what only scalars and literals decide: torch's functions take no Python numbers."""

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


ROWS = {"q_idx": "q_row", "kv_idx": "kv_row"}
"""The position of a query or key -> its row, which with the offset is its position where none is given."""

_MODULE_FUNCTIONS = (*sorted((FLOAT_FUNCTIONS | ROUNDINGS) - {"sigmoid", "erf"}), "abs", "minimum", "maximum", "where")


@dataclass
class ArrayPrinter(Printer):
    """torch or jnp. An index that may leave its tensor is clamped to the ends.

    `numbers` are the variables that are Python numbers and no arrays. `row_dims` says which axes of which tensors are
    indexed by row, where a call gives its rows positions of their own; `placed` gives the source of an index that is
    not clamped to its axis but found in another way, if any. Of the tensors `kept` no gradient comes from pairs that
    the mask leaves out, even where it would be no number.
    """

    module: str = "torch"
    numbers: frozenset[str] = frozenset()
    float_cast: Callable[[str], str] = lambda x: f"{x}.to(score.dtype)"
    int_cast: Callable[[str], str] = lambda x: f"{x}.to(torch.int64)"
    clamp: Callable[[str, str], str] = lambda x, size: f"{x}.clamp(0, {size} - 1)"
    exact_dims: Callable[[str, int, Expr], bool] = lambda tensor, axis, index: False
    row_dims: Callable[[str, int], bool] = lambda tensor, axis: False
    placed: Callable[[str, int, str], str] = lambda tensor, axis, index: ""
    kept: frozenset[str] = frozenset()
    by_row: bool = False

    def __post_init__(self) -> None:
        table = {name: f"{self.module}.{name}" for name in _MODULE_FUNCTIONS}
        special = "torch.special" if self.module == "torch" else "jax.scipy.special"
        sigmoid = "torch.sigmoid" if self.module == "torch" else "jax.nn.sigmoid"
        self.functions = table | {
            "min": table["minimum"],
            "max": table["maximum"],
            "sigmoid": sigmoid,
            "relu": "torch.relu" if self.module == "torch" else "jax.nn.relu",
            "erf": f"{special}.erf",
        }
        self.infix = {**_INFIX, **_PYTHON_INTEGER}

    def is_number(self, e: Expr) -> bool:
        """Whether `e` is a Python number, or a Python bool."""
        return self.numbers >= names(e) and not loads(e)

    def variable(self, e: Var) -> str:
        return ROWS.get(e.name, e.name) if self.by_row else e.name

    def operation(self, e: Op) -> tuple[str, int]:
        return NumberPrinter().operation(e) if self.is_number(e) else super().operation(e)

    def call(self, e: Op) -> str:
        if e.op in ("float", "int"):
            # torch casts by a method, jnp by a function.
            inner = self.operand(e.args[0], ATOM) if self.module == "torch" else self.text(e.args[0])
            return self.float_cast(inner) if e.op == "float" else self.int_cast(inner)
        if e.op in ("min", "max"):
            return self._extreme(e)
        if e.op == "clamp":
            return self._clamp(e)
        if e.op == "abs" and e.type is Type.FLOAT and self.module == "jnp":
            # The derivative of jnp.abs at 0 is 1.
            return f"({self.operand(e.args[0], PRODUCT)} * jnp.sign({self.text(e.args[0])}))"
        if e.op == "where" and self.module == "torch":
            return self._torch_where(e)
        return super().call(e)

    def _torch_where(self, e: Op) -> str:
        """A choice between tensors, even of Python numbers: torch's functions take no numbers, and its `where` makes
        float32 of two floats, whatever the dtype of the score."""
        condition, a, b = e.args
        if self.is_number(condition):
            return f"({self._array(a)} if {self.text(condition)} else {self._array(b)})"
        other = self._array(b) if self.is_number(a) else self.text(b)
        return f"torch.where({self.text(condition)}, {self.text(a)}, {other})"

    def _extreme(self, e: Op) -> str:
        """torch.minimum takes no Python numbers, jnp.minimum does. Tensor.clamp does, but of floats it has another
        derivative where both are equal."""
        if self.module != "torch":
            return super().call(e)
        if e.type is Type.FLOAT:
            return f"{self.functions[e.op]}({', '.join(self._array(a) for a in e.args)})"
        for x, bound in (e.args, e.args[::-1]):
            if self.is_number(bound):
                side = "max" if e.op == "min" else "min"
                return f"{self.operand(x, ATOM)}.clamp({side}={self.text(bound)})"
        return super().call(e)

    def _array(self, e: Expr) -> str:
        """The text of a torch tensor, of a Python number, too."""
        if not self.is_number(e):
            return self.text(e)
        dtype = {Type.FLOAT: "", Type.INT: ", dtype=torch.int64", Type.BOOL: ", dtype=torch.bool"}[e.type]
        return f"score.new_full((), {self.text(e)}{dtype})"

    def _clamp(self, e: Op) -> str:
        """With the derivative of torch's clamp, which at the ends is not that of jnp.clip."""
        x, low, high = e.args
        if self.module == "torch":
            inner = self._array(x) if self.is_number(x) else self.operand(x, ATOM)
            return f"{inner}.clamp(min={self.text(low)}).clamp(max={self.text(high)})"
        above = Op(Type.BOOL, "gt", (x, high))
        beyond = self.text(logical_or(above, compare("gt", low, high)))
        below = self.text(Op(Type.BOOL, "lt", (x, low)))
        return f"jnp.where({beyond}, {self.text(high)}, jnp.where({below}, {self.text(low)}, {self.text(x)}))"

    def load(self, e: Load) -> str:
        element = f"{e.tensor}[{', '.join(self.indices(e))}]" if e.indices else e.tensor
        return f"{self.module}.where(keep, {element}, 0.0)" if e.tensor in self.kept else element

    def indices(self, e: Load) -> list[str]:
        """The indices of a read, clamped to the tensor."""
        return [self._index(e.tensor, axis, index) for axis, index in enumerate(e.indices)]

    def _index(self, tensor: str, axis: int, index: Expr) -> str:
        outer, self.by_row = self.by_row, self.row_dims(tensor, axis)
        try:
            return self._clamped(tensor, axis, index)
        finally:
            self.by_row = outer

    def _clamped(self, tensor: str, axis: int, index: Expr) -> str:
        if self.exact_dims(tensor, axis, index):
            return self.text(index)
        if placed := self.placed(tensor, axis, self.text(index)):
            return placed
        size = f"{tensor}.shape[{axis}]"
        if self.module == "torch" and self.is_number(index):
            return f"min(max({self.operand(index, ATOM)}, 0), {size} - 1)"
        return self.clamp(self.operand(index, ATOM), size)


def torch_printer(exact_dims: Callable[[str, int, Expr], bool], **options: Any) -> ArrayPrinter:
    return ArrayPrinter(exact_dims=exact_dims, **options)


def jnp_printer(exact_dims: Callable[[str, int, Expr], bool], **options: Any) -> ArrayPrinter:
    dialect: dict[str, Any] = {
        "float_cast": lambda x: f"jnp.asarray({x}, score.dtype)",
        "int_cast": lambda x: f"jnp.asarray({x}).astype(jnp.int32)",
        "clamp": lambda x, size: f"jnp.clip({x}, 0, {size} - 1)",
    }
    return ArrayPrinter(module="jnp", exact_dims=exact_dims, **(dialect | options))


WIDE_INDICES = ("b", "h", "hkv")
"""Index names that kernels hold in 64 bits, for the offsets they are part of. As a value each has 32 bits, as positions
have: a bound that one made wider could not be a coordinate of a TMA copy."""
