"""Expressions evaluated with numpy: `show` draws the result, and tests of block analysis compare with it.

>>> from codegen.ir import expr
>>> e = expr.compare("ge", expr.int_var("q_idx"), expr.int_var("kv_idx"))
>>> evaluate(e, {"q_idx": np.arange(2)[:, None], "kv_idx": np.arange(3)}, {})
array([[ True, False, False],
       [ True,  True, False]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from codegen.ir.expr import Const, Expr, Load, Op, Type, Var

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, "Array | int | float"]

_DTYPES = {Type.INT: np.int64, Type.FLOAT: np.float64, Type.BOOL: np.bool_}
"""Wide enough that no position overflows and no float comparison rounds more than the tensor's own dtype does."""

_erf = np.frompyfunc(math.erf, 1, 1)  # numpy has none

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "relu": lambda x: np.maximum(x, 0.0),
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "float": lambda x: x,  # `value` casts each result to its node's dtype, a float to an integer toward zero
    "int": lambda x: x,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "not": np.logical_not,
    "and": lambda *args: reduce(np.logical_and, args),
    "or": lambda *args: reduce(np.logical_or, args),
    "where": np.where,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "pow": np.power,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "erf": _erf,
}


def evaluate(e: Expr, values: Values, tensors: Mapping[str, Array]) -> Array:
    """The value of `e`: int64, float64 or bool, in the shape its variables and indices broadcast to.

    `values` holds the variables by name, `tensors` what loads read. Integers divide as in Python; an index is
    clamped to its axis. A shared subexpression is computed once.
    """
    with np.errstate(all="ignore"):  # NaN, infinity and the result of a division by 0 are values of the language
        return _Evaluator(values, tensors).value(e)


class _Evaluator:
    def __init__(self, values: Values, tensors: Mapping[str, Array]) -> None:
        self.values = values
        self.tensors = tensors
        self.known: dict[Expr, Array] = {}

    def value(self, e: Expr) -> Array:
        if e not in self.known:
            self.known[e] = np.asarray(self.compute(e), dtype=_DTYPES[e.type])
        return self.known[e]

    def compute(self, e: Expr) -> Any:
        if isinstance(e, Const):
            return e.value
        if isinstance(e, Var):
            return self.values[e.name]
        if isinstance(e, Load):
            tensor = self.tensors[e.tensor]
            sizes = zip(e.indices, tensor.shape, strict=True)
            return tensor[tuple(np.clip(self.value(index), 0, size - 1) for index, size in sizes)]
        assert isinstance(e, Op)
        return _FUNCTIONS[e.op](*(self.value(a) for a in e.args))
