"""Translates functions of torch, and methods of tensors with the same names, to the expression language."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from codegen.ir.language import FUNCTIONS
from codegen.port.arithmetic import Arithmetic, call, logical, no_number
from codegen.port.made_of import FUNCTIONS as MADE
from codegen.port.made_of import made_of_others, truncated_quotient
from codegen.port.values import (
    Captured,
    Closure,
    Constant,
    Joined,
    Kind,
    Library,
    Several,
    Symbol,
    TranslationError,
    Unread,
    Value,
)

Arguments = Sequence[Value]

SAME = {
    **{name: name for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "sin", "cos", "tan", "tanh", "erf")},
    "sigmoid": "sigmoid",
    "floor": "floor",
    "ceil": "ceil",
    "round": "round",
    "silu": "silu",
    "gelu": "gelu",
}
"""Functions of one argument with a float result: torch's name -> the language's."""

BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "subtract": ast.Sub,
    "mul": ast.Mult,
    "multiply": ast.Mult,
    "true_divide": ast.Div,
    "floor_divide": ast.FloorDiv,
    "remainder": ast.Mod,
    "pow": ast.Pow,
    "logical_and": ast.BitAnd,
    "logical_or": ast.BitOr,
    "logical_xor": ast.BitXor,
    "bitwise_and": ast.BitAnd,
    "bitwise_or": ast.BitOr,
    "bitwise_xor": ast.BitXor,
    "bitwise_left_shift": ast.LShift,
    "bitwise_right_shift": ast.RShift,
}
COMPARED: dict[str, type[ast.cmpop]] = {
    "eq": ast.Eq,
    "ne": ast.NotEq,
    "not_equal": ast.NotEq,
    "lt": ast.Lt,
    "less": ast.Lt,
    "le": ast.LtE,
    "less_equal": ast.LtE,
    "gt": ast.Gt,
    "greater": ast.Gt,
    "ge": ast.GtE,
    "greater_equal": ast.GtE,
}
CASTS = {
    **dict.fromkeys(("float", "float16", "float32", "float64", "bfloat16", "half", "double"), Kind.FLOAT),
    **dict.fromkeys(("int", "int8", "int16", "int32", "int64", "uint8", "short", "long"), Kind.INT),
    "bool": Kind.BOOL,
}
DTYPES = {Kind.INT: "int32", Kind.FLOAT: "float32", Kind.BOOL: "bool"}
"""A dtype of each kind of number, as it is in a score or a mask."""

NARROW = ("int8", "int16", "uint8", "short")
"""Casts to fewer bits than the language's integers have."""

HALF = ("half", "float16", "bfloat16")
"""Casts to floats of 16 bits, to which torch rounds."""

IN_FLOAT32 = "and the expression language computes in float32"

RESHAPED = ("squeeze", "unsqueeze", "view_as", "expand_as")
UNCHANGED = ("contiguous", "clone", "item", "cuda", "cpu", *RESHAPED)
"""Methods that leave the value of a single number as it is."""

CONSTANTS = {"inf": math.inf, "pi": math.pi, "e": math.e, "tau": math.tau}
FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "zeros": 0, "ones": 1}
REDUCTIONS = ("sum", "mean", "max", "min", "any", "all", "cumsum", "argmax", "prod", "softmax", "sort", "norm")

_OTHERS = (
    *("where", "abs", "absolute", "neg", "negative", "minimum", "maximum", "min", "max", "clamp", "clip"),
    *("clamp_min", "clamp_max", "relu", "square", "div", "divide", "logical_not", "bitwise_not", "tensor"),
    *("as_tensor", "scalar_tensor", "full_like", "full", "to", "type", "type_as", "masked_fill", "detach", "fmod"),
    *("positive", *MADE),
)
KNOWN = frozenset((*SAME, *BINARY, *COMPARED, *CASTS, *FILLED, *UNCHANGED, *_OTHERS))


class Functions(Arithmetic):
    """Arithmetic with the functions of torch."""

    def apply(self, name: str, args: Arguments, options: Mapping[str, Value], node: ast.AST) -> Value:
        """`name(*args, **options)`; for a method, its tensor is the first of `args`."""
        if name in ("max", "min") and len(args) == 1 and isinstance(args[0], Several):
            args = args[0].items
        if name in ("max", "min") and len(args) == 1:
            raise TranslationError(node, f"'{name}' of one tensor is a reduction; the language sees one pair at a time")
        known = [arg.value for arg in args if isinstance(arg, Constant)]
        if len(known) == len(args) == 1 and name in ("sqrt", "log", "log2", "exp", "floor", "ceil", "abs", "exp2"):
            return self._folded_call(name, known[0], node)
        if name in FILLED:
            return self._filled(FILLED[name], options)
        if name in ("full_like", "full", "tensor", "as_tensor", "scalar_tensor"):
            return self._made(name, args, options, node)
        if name in ("to", "type"):
            return self._converted(args, options, node)
        if name in UNCHANGED:
            value = args[0]
            if name in RESHAPED and isinstance(value, Captured) and not value.indices and isinstance(node, ast.expr):
                return replace(value, made_by=node)
            return value
        if name == "type_as":
            x, like = self._exactly(2, args, name, node)
            kind = self.symbol(like, node).kind
            return self.cast(x, DTYPES[kind], node) if kind in DTYPES else x
        if name == "detach":
            return self._detached(args, name, node)
        handlers: Mapping[str, Callable[[], Value]] = {
            "where": lambda: self._where(args, name, node),
            "masked_fill": lambda: self._masked_fill(args, name, node),
            "clamp": lambda: self._clamp(args, options, node),
            "clip": lambda: self._clamp(args, options, node),
            "clamp_min": lambda: self.extreme("max", self._exactly(2, args, name, node), node),
            "clamp_max": lambda: self.extreme("min", self._exactly(2, args, name, node), node),
            "div": lambda: self._division(args, options, node),
            "divide": lambda: self._division(args, options, node),
        }
        if name in handlers:
            return handlers[name]()
        if name in ("add", "sub", "subtract") and set(options) == {"alpha"}:
            a, b = self._exactly(2, args, name, node)
            return self.binary(BINARY[name](), a, self.binary(ast.Mult(), options["alpha"], b, node), node)
        if options and not (name == "gelu" and options == {"approximate": Constant("none")}):
            raise TranslationError(node, f"'{name}' with {', '.join(options)}= is not in the expression language")
        if name in ("maximum", "minimum", "max", "min"):
            return self.extreme(name[:3], args, node)
        if name in BINARY:
            a, b = self._exactly(2, args, name, node)
            if name.startswith("logical"):
                a, b = self.boolean(a, node), self.boolean(b, node)
            return self.binary(BINARY[name](), a, b, node)
        if name in COMPARED:
            return self.compare([COMPARED[name]()], self._exactly(2, args, name, node), node)
        if name == "fmod":
            return self._fmod(*(self.number(arg, node) for arg in self._exactly(2, args, name, node)))
        (x,) = self._exactly(1, args, name, node)
        if name in CASTS:
            return self.cast(x, name, node)
        if name in ("logical_not", "bitwise_not"):
            return self.unary(ast.Not() if name == "logical_not" else ast.Invert(), x, node)
        if name in ("neg", "negative"):
            return self.unary(ast.USub(), x, node)
        return self._of_one(name, self.number(x, node), node)

    def _of_one(self, name: str, x: Symbol, node: ast.AST) -> Symbol:
        """Functions of one number."""
        if name in ("abs", "absolute"):
            return self.joined(call("abs", x.node), x)
        if name == "square":
            return self.power(x, ast.Constant(2))
        if name == "relu":
            return self.joined(call("relu", x.node), x)
        if name == "positive":
            return x
        if name in MADE:
            return made_of_others(name, x)
        if name not in SAME or SAME[name] not in FUNCTIONS:
            raise TranslationError(node, f"'{name}' has no counterpart in the expression language")
        return Symbol(call(SAME[name], x.node), Kind.FLOAT)

    def _fmod(self, a: Symbol, b: Symbol) -> Symbol:
        """The remainder with the sign of `a`, as in C."""
        left, right = (x.node if isinstance(x.node, ast.Constant) else call("abs", x.node) for x in (a, b))
        rest = self.binary(ast.Mod(), replace(a, node=left), replace(b, node=right), a.node)
        assert isinstance(rest, Symbol)
        negative = ast.Compare(a.node, [ast.Lt()], [ast.Constant(0)])
        return replace(rest, node=call("where", negative, ast.UnaryOp(ast.USub(), rest.node), rest.node))

    def cast(self, value: Value, dtype: str, node: ast.AST) -> Value:
        """`value.to(dtype)`."""
        kind = CASTS[dtype]
        if isinstance(value, Constant):
            if dtype in HALF and not _fits(value.value, dtype):
                raise TranslationError(node, f"{dtype} rounds {value.value!r}, {IN_FLOAT32}")
            return self._cast_constant(value, kind, node)
        if kind is Kind.BOOL:
            return self.boolean(value, node)
        is_bit = isinstance(value, Symbol) and value.kind is Kind.BOOL
        if dtype in NARROW and not (is_bit or isinstance(value, Captured)):
            raise TranslationError(
                node, f"numbers beyond {dtype} wrap around, and the language's integers have 32 bits"
            )
        if dtype in HALF and not isinstance(value, Captured):
            raise TranslationError(
                node, f"{dtype} rounds numbers, {IN_FLOAT32}; leave the conversion out, or write .float()"
            )
        x = self.number(value, node)
        if kind is Kind.INT and x.kind is not Kind.INT:
            # A captured tensor that is converted to integers is guessed to hold integers; anything else is rounded.
            x = self.guess(x, Kind.INT) if isinstance(value, Captured) else x
            return x if x.kind is Kind.INT else Symbol(call("int", x.node), Kind.INT)
        is_converted = kind is Kind.FLOAT and (x.is_converted or x.kind is Kind.INT)
        return Symbol(x.node, kind, x.undecided, is_converted=is_converted)

    def _cast_constant(self, value: Constant, kind: Kind, node: ast.AST) -> Constant:
        types = {Kind.INT: int, Kind.FLOAT: float, Kind.BOOL: bool}
        if not isinstance(value.value, int | float | str):
            raise TranslationError(node, no_number(value))
        try:
            return Constant(types[kind](value.value))
        except (ValueError, OverflowError):
            raise TranslationError(node, f"{value.value!r} is no {kind.value}") from None

    def extreme(self, name: str, args: Arguments, node: ast.AST) -> Value:
        """`min(a, b)` or `max(a, b)`."""
        if all(isinstance(arg, Constant) and isinstance(arg.value, int | float) for arg in args):
            values = [arg.value for arg in args if isinstance(arg, Constant) and isinstance(arg.value, int | float)]
            return Constant(max(values) if name == "max" else min(values))
        symbols = [self.number(arg, node) for arg in args]
        return self.joined(call(name, *(symbol.node for symbol in symbols)), *symbols)

    def _detached(self, args: Arguments, name: str, node: ast.AST) -> Value:
        (value,) = self._exactly(1, args, name, node)
        if isinstance(value, Symbol) and value.kind in (Kind.FLOAT, Kind.UNKNOWN) and not value.is_converted:
            raise TranslationError(node, "a part of a score cannot be left out of its derivative")
        return value

    def _where(self, args: Arguments, name: str, node: ast.AST) -> Value:
        condition, a, b = self._exactly(3, args, name, node)
        return self.where(condition, a, b, node)

    def _masked_fill(self, args: Arguments, name: str, node: ast.AST) -> Value:
        x, condition, fill = self._exactly(3, args, name, node)
        return self.where(condition, fill, x, node)

    def _clamp(self, args: Arguments, options: Mapping[str, Value], node: ast.AST) -> Value:
        none = Constant(None)
        given = [*args[1:], none, none]
        low, high = options.get("min", given[0]), options.get("max", given[1])
        if low == none or high == none:
            bound, name = (high, "min") if low == none else (low, "max")
            return self.extreme(name, [args[0], bound], node)
        symbols = [self.number(value, node) for value in (args[0], low, high)]
        return self.joined(call("clamp", *(symbol.node for symbol in symbols)), *symbols)

    def _division(self, args: Arguments, options: Mapping[str, Value], node: ast.AST) -> Value:
        a, b = self._exactly(2, args, "div", node)
        mode = options.get("rounding_mode", Constant(None))
        if mode == Constant(None):
            return self.binary(ast.Div(), a, b, node)
        if mode == Constant("floor"):
            return self.binary(ast.FloorDiv(), a, b, node)
        if mode != Constant("trunc"):
            raise TranslationError(node, "rounding_mode is 'floor' or 'trunc'; this one is not known")
        x, y = self.number(a, node), self.number(b, node)
        if Kind.FLOAT in (x.kind, y.kind):
            quotient = self.binary(ast.Div(), x, y, node)
            return made_of_others("trunc", self.number(quotient, node))
        x, y = self.integer(x, node, "a dividend"), self.integer(y, node, "a divisor")
        return Symbol(truncated_quotient(x, y), Kind.INT)

    def _filled(self, number: int, options: Mapping[str, Value]) -> Constant:
        dtype = options.get("dtype")
        is_bool = isinstance(dtype, Library) and dtype.last == "bool"
        return Constant(bool(number) if is_bool else number)

    def _made(self, name: str, args: Arguments, options: Mapping[str, Value], node: ast.AST) -> Value:
        """A new tensor of one number, of the dtype that is given, or that of the tensor which it is like."""
        value = options.get("fill_value") or (args[1] if name in ("full_like", "full") and len(args) > 1 else args[0])
        if isinstance(value, Constant | Symbol | Captured):
            dtype = options.get("dtype")
            if isinstance(dtype, Library) and dtype.last in CASTS:
                return self.cast(value, dtype.last, node)
            like = args[0] if name == "full_like" and dtype is None else None
            if isinstance(like, Symbol) and like.kind in DTYPES:
                return self.cast(value, DTYPES[like.kind], node)
            return value
        raise TranslationError(node, "a tensor that is made here must hold one number")

    def _converted(self, args: Arguments, options: Mapping[str, Value], node: ast.AST) -> Value:
        for target in [*args[1:], *options.values()]:
            if isinstance(target, Library) and target.last in CASTS:
                return self.cast(args[0], target.last, node)
        return args[0]

    def _folded_call(self, name: str, value: object, node: ast.AST) -> Constant:
        functions: dict[str, Callable[[float], float]] = {
            "sqrt": math.sqrt,
            "log": math.log,
            "log2": math.log2,
            "exp": math.exp,
            "floor": math.floor,
            "ceil": math.ceil,
            "abs": abs,
            "exp2": math.exp2,
        }
        if not isinstance(value, int | float):
            raise TranslationError(node, f"{value!r} is no number")
        try:
            return Constant(functions[name](value))
        except (ValueError, OverflowError):
            raise TranslationError(node, "this constant has no finite value") from None

    def _exactly(self, count: int, args: Arguments, name: str, node: ast.AST) -> Arguments:
        if len(args) != count:
            raise TranslationError(node, f"'{name}' takes {count} argument{'s' * (count != 1)} here, got {len(args)}")
        return args

    def all_of(self, is_and: bool, values: Arguments, node: ast.AST) -> Value:
        """Values joined by `and` or `or`: as in Python, the first one that decides, else the last one. So
        `window or 256` is a number."""
        kept: list[Value] = []
        for place, value in enumerate(values, start=1):
            truth = known_truth(value)
            if truth is not is_and or place == len(values):
                kept.append(value)
            if truth is not None and truth is not is_and:
                break
        if len(kept) == 1:
            return kept[0]
        symbols = [self.symbol(value, node) for value in kept]
        if {symbol.kind for symbol in symbols} <= {Kind.BOOL, Kind.UNKNOWN}:
            return logical(is_and, [self.boolean(symbol, node) for symbol in symbols])
        result: Value = symbols[-1]
        zero = ast.Constant(0)
        for symbol in reversed(symbols[:-1]):
            first, second = (result, symbol) if is_and else (symbol, result)
            is_true = symbol.node if symbol.kind is Kind.BOOL else ast.Compare(symbol.node, [ast.NotEq()], [zero])
            result = self.where(Symbol(is_true, Kind.BOOL), first, second, node)
        return result


def known_truth(value: Value) -> bool | None:
    """What Python takes a value for in a condition; None if that is known only when the program runs."""
    if isinstance(value, Constant):
        return bool(value.value)
    if isinstance(value, Several):
        return bool(value.items)
    return True if isinstance(value, Closure | Joined | Unread | Library) else None


def _fits(value: object, dtype: str) -> bool:
    """True for a number that a float of 16 bits holds without a rounding."""
    if not isinstance(value, int | float):
        return False
    try:
        if dtype == "bfloat16":  # the upper half of a float32
            return struct.pack(">f", value)[2:] == b"\0\0" and struct.unpack(">f", struct.pack(">f", value)) == (value,)
        return struct.unpack("e", struct.pack("e", value)) == (value,)
    except OverflowError:
        return False


def is_reshaped(value: ast.expr) -> bool:
    """True for a call that changes the shape of a tensor, such as `ids.squeeze(0)`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in RESHAPED


def is_filled(value: ast.expr) -> bool:
    """True for an expression that makes a tensor of equal numbers, such as `torch.zeros(n, device="cuda")`."""
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Attribute) and called.attr in (*FILLED, "full", "full_like") for called in calls)
