"""Expressions as torch or jnp source: plain broadcasting mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen.ir.expr import (
    FLOAT_FUNCTIONS,
    ROUNDINGS,
    SCORE,
    Expr,
    Load,
    Op,
    Type,
    Var,
    loads,
    logical_not,
    names,
    walk,
)
from codegen.ir.printers.base import ATOM, INFIX, PYTHON_INTEGER, Printer
from codegen.ir.printers.formula import NumberPrinter

ROWS = {"q_idx": "q_row", "kv_idx": "kv_row"}
"""Position of a query or key -> its row. Where the call gives no positions, row plus offset is the position."""

_STEEP = frozenset(("div", "exp", "exp2", "log", "log1p", "log2", "mul", "pow", "sqrt", "tan"))
"""Operations whose derivative may be infinite or NaN: 0 times it is no zero gradient."""

_CHOICES = {"min": "minimum", "max": "maximum", "clamp": "clamp", "abs": "absolute"}
"""Function of floats -> that of the runtime's `choices`, whose derivative is a choice too."""

_MODULE_FUNCTIONS = (*sorted((FLOAT_FUNCTIONS | ROUNDINGS) - {"sigmoid", "erf"}), "abs", "minimum", "maximum", "where")


@dataclass
class ArrayPrinter(Printer):
    """Source for torch or jnp. An index that may be out of range is clamped to the ends of its axis.

    `numbers`: variables that are Python numbers, not arrays; `scalars`: those that may be either. `exact_dims(tensor,
    axis, index)`: True if an index is always in range. `row_dims(tensor, axis)`: True if the axis is indexed by row
    although the call gives positions. `placed(tensor, axis)`: the function that finds an index in another way than by
    clamping, and its arguments after the index, or (). `like`: a tensor of the call's device, and `float_dtype`: the
    dtype of floats. `kept`: tensors that get no gradient from masked pairs, not even a NaN. `choices`: print functions
    whose derivative is a choice as those of the runtime's `choices`. `chosen`: the conditions of the choices around the
    text, outside of which these tensors and the score get none either. `reads`: the variables, tensors and functions
    that the printed source reads.
    """

    module: str = "torch"
    numbers: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    float_cast: Callable[[str], str] = lambda x: f"{x}.to(score.dtype)"
    int_cast: Callable[[str], str] = lambda x: f"{x}.to(torch.int64)"
    clamp: Callable[[str, str], str] = lambda x, size: f"{x}.clamp(0, {size} - 1)"
    exact_dims: Callable[[str, int, Expr], bool] = lambda tensor, axis, index: False
    row_dims: Callable[[str, int], bool] = lambda tensor, axis: False
    placed: Callable[[str, int], Sequence[str]] = lambda tensor, axis: ()
    kept: frozenset[str] = frozenset()
    chosen: tuple[str, ...] = ()
    by_row: bool = False
    choices: bool = False
    like: str = "score"
    float_dtype: str = "score.dtype"
    reads: set[str] = field(default_factory=set)

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
        self.infix = {**INFIX, **PYTHON_INTEGER}

    def is_number(self, e: Expr) -> bool:
        """True if `e` is a Python number or a Python bool."""
        return self.numbers >= names(e) and not loads(e)

    def variable(self, e: Var) -> str:
        name = ROWS.get(e.name, e.name) if self.by_row else e.name
        self.reads.add(name)
        return self._only_if(self.chosen, name) if name == SCORE else name

    def operation(self, e: Op) -> tuple[str, int]:
        if e.op == "div" and self.scalars >= names(e) and not loads(e):
            # Python refuses to divide by zero, where kernels compute infinity or NaN.
            self.reads.add(self.module)
            return f"{self.module}.divide({', '.join(map(self.text, e.args))})", ATOM
        if not self.is_number(e):
            return super().operation(e)
        self.reads |= names(e)
        return NumberPrinter(reads=self.reads).operation(e)

    def call(self, e: Op) -> str:
        self.reads.add(self.module)
        if e.op in ("float", "int"):
            # torch casts by a method, jnp by a function.
            inner = self.operand(e.args[0], ATOM) if self.module == "torch" else self.text(e.args[0])
            return self.float_cast(inner) if e.op == "float" else self.int_cast(inner)
        if self.choices and e.op in _CHOICES and e.type is Type.FLOAT:
            self.reads.add("choices")
            return f"choices.{_CHOICES[e.op]}({', '.join(map(self.text, e.args))})"
        if e.op in ("min", "max"):
            return self._extreme(e)
        if e.op == "clamp":
            return self._clamp(e)
        return self._where(e) if e.op == "where" else super().call(e)

    def _where(self, e: Op) -> str:
        """A choice. At least one arm of torch's is printed as a tensor: its functions take no Python numbers, and
        `torch.where` of two Python floats is float32, whatever the dtype of the score."""
        condition, a, b = e.args
        if self.module == "torch" and self.is_number(condition):
            return f"({self._array(a)} if {self.text(condition)} else {self._array(b)})"
        test = self._condition(condition)
        first, second = self._arm(a, condition), self._arm(b, logical_not(condition))
        if self.module == "torch" and self.is_number(a) and self.is_number(b):
            second = self._array(b)
        return f"{self.module}.where({test}, {first}, {second})"

    def _condition(self, e: Expr) -> str:
        """A condition, through which no gradient flows."""
        outer, self.chosen = self.chosen, ()
        try:
            return self.text(e)
        finally:
            self.chosen = outer

    def _arm(self, e: Expr, condition: Expr) -> str:
        """An arm of a choice. Where its derivative may be infinite or NaN, what it reads gets no gradient from pairs
        that take the other arm."""
        outer = self.chosen
        if any(self._is_steep(node) for node in walk(e)):
            self.chosen = (*outer, self._condition(condition))
        try:
            return self.text(e)
        finally:
            self.chosen = outer

    def _is_steep(self, e: Expr) -> bool:
        if not isinstance(e, Op) or e.op not in _STEEP or e.type is not Type.FLOAT:
            return False
        factors = e.args if e.op == "mul" else e.args[1:] if e.op == "div" else ()
        return not any(map(self.is_number, factors))

    def _only_if(self, conditions: Sequence[str], text: str) -> str:
        for condition in conditions:
            self.reads.add(self.module)
            text = f"{self.module}.where({condition}, {text}, 0.0)"
        return text

    def _extreme(self, e: Op) -> str:
        """`min` or `max`. jnp.minimum takes Python numbers, torch.minimum does not. Tensor.clamp does, but for floats
        its derivative differs where both operands are equal."""
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
        """The text of `e` as a torch tensor, also if it is a Python number."""
        if not self.is_number(e):
            return self.text(e)
        dtype = {Type.FLOAT: self.float_dtype, Type.INT: "torch.int64", Type.BOOL: "torch.bool"}[e.type]
        self.reads.add(self.like)
        return f"{self.like}.new_full((), {self.text(e)}, dtype={dtype})"

    def _clamp(self, e: Op) -> str:
        """`clamp`. In torch it has the derivative of its first argument at the ends."""
        x, low, high = e.args
        if self.module != "torch":
            return f"{self.module}.clip({self.text(x)}, {self.text(low)}, {self.text(high)})"
        inner = self._array(x) if self.is_number(x) else self.operand(x, ATOM)
        return f"{inner}.clamp(min={self.text(low)}).clamp(max={self.text(high)})"

    def load(self, e: Load) -> str:
        self.reads.add(e.tensor)
        element = f"{e.tensor}[{', '.join(self.indices(e))}]" if e.indices else e.tensor
        return self._only_if(("keep", *self.chosen), element) if e.tensor in self.kept else element

    def indices(self, e: Load) -> list[str]:
        """The indices of a load, each clamped to its axis."""
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
        if placed := self.placed(tensor, axis):
            function, *arguments = placed
            self.reads.update(placed)
            return f"{function}({', '.join([self.text(index), *arguments])})"
        self.reads.add(self.module)
        size = f"{tensor}.shape[{axis}]"
        if self.module == "torch" and self.is_number(index):
            return f"min(max({self.operand(index, ATOM)}, 0), {size} - 1)"
        return self.clamp(self.operand(index, ATOM), size)


def torch_printer(exact_dims: Callable[[str, int, Expr], bool], **options: Any) -> ArrayPrinter:
    """A printer of torch source; `options` are fields of `ArrayPrinter`."""
    return ArrayPrinter(exact_dims=exact_dims, **options)


def jnp_printer(exact_dims: Callable[[str, int, Expr], bool], **options: Any) -> ArrayPrinter:
    """A printer of jnp source; `options` are fields of `ArrayPrinter`."""
    dialect: dict[str, Any] = {
        "float_cast": lambda x: f"jnp.asarray({x}, score.dtype)",
        "int_cast": lambda x: f"jnp.asarray({x}).astype(jnp.int32)",
        "clamp": lambda x, size: f"jnp.clip({x}, 0, {size} - 1)",
    }
    return ArrayPrinter(module="jnp", exact_dims=exact_dims, **(dialect | options))
