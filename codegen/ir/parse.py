"""Text to IR: a Python expression, read with `ast` and never evaluated, checked against the names in scope.

>>> from codegen.ir.expr import Type
>>> e = parse("q_idx >= kv_idx and q_idx - kv_idx < 4096", Scope(), Type.BOOL)
>>> e.op, len(e.args)
('and', 2)
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from codegen.ir import expr
from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, SCORE, Expr, Load, ScalarType, TensorSpec, Type, Var
from codegen.util.errors import ExprError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Macro:
    """A named, parametrised expression of `masks:` or `scores:`. The latter may be of integers: FLOAT is any number."""

    name: str
    params: tuple[str, ...]
    body: str
    type: Type


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The names an expression may read besides the indices.

    `axes`, where given, are all there is: the expression is the example of a tensor. `expanded` holds the named
    expressions that were used before, by name and arguments.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    scalars: Mapping[str, ScalarType] = field(default_factory=dict)
    macros: Mapping[str, Macro] = field(default_factory=dict)
    bound: Mapping[str, Expr] = field(default_factory=dict)
    expanding: tuple[str, ...] = ()
    expanded: dict[tuple[object, ...], Expr] = field(default_factory=dict, compare=False)
    axes: tuple[str, ...] | None = None


def _silu(x: Expr) -> Expr:
    return expr.mul(x, expr.function("sigmoid", x))


def _gelu(x: Expr) -> Expr:
    erf = expr.function("erf", expr.mul(expr.const(0.7071067811865476), x))
    return expr.mul(expr.const(0.5), expr.mul(x, expr.add(expr.const(1.0), erf)))


def _fold(pair: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    def chained(*args: Expr) -> Expr:
        result = args[0]
        for a in args[1:]:
            result = pair(result, a)
        return result

    return chained


# name -> (fewest arguments, most arguments, builder)
FUNCTIONS: dict[str, tuple[int, int, Callable[..., Expr]]] = {
    "abs": (1, 1, expr.absolute),
    "min": (2, 8, _fold(expr.minimum)),
    "max": (2, 8, _fold(expr.maximum)),
    "clamp": (3, 3, expr.clamp),
    "relu": (1, 1, expr.relu),
    "silu": (1, 1, lambda x: _silu(expr.to_float(x))),
    "gelu": (1, 1, lambda x: _gelu(expr.to_float(x))),
    "int": (1, 1, expr.to_integer),
    **{name: (1, 1, lambda x, name=name: expr.function(name, x)) for name in sorted(expr.FLOAT_FUNCTIONS)},
    **{name: (1, 1, lambda x, name=name: expr.rounded(name, x)) for name in sorted(expr.ROUNDINGS)},
}

MOST_MEMBERS = 64
"""The longest list that `in` looks through: each of its elements is a comparison in the kernels."""

INFINITY = "inf"
"""The number that a score is less of where a pair is left out."""

_BINARY = {
    ast.Add: ("+", expr.add),
    ast.Sub: ("-", expr.sub),
    ast.Mult: ("*", expr.mul),
    ast.Div: ("/", expr.div),
    ast.FloorDiv: ("//", expr.floordiv),
    ast.Mod: ("%", expr.mod),
}
_Pair = Callable[[Expr, Expr], Expr]

_BITS: dict[type[ast.operator], tuple[str, _Pair, _Pair]] = {
    ast.BitAnd: ("&", expr.logical_and, expr.bit_and),
    ast.BitOr: ("|", expr.logical_or, expr.bit_or),
    ast.BitXor: ("^", lambda a, b: expr.compare("ne", a, b), expr.bit_xor),
}
"""The operators that join booleans, or the bits of integers."""

_SHIFTS: dict[type[ast.operator], tuple[str, _Pair]] = {
    ast.LShift: ("<<", expr.shift_left),
    ast.RShift: (">>", expr.shift_right),
}

_COMPARE = {
    ast.Lt: ("<", "lt"),
    ast.LtE: ("<=", "le"),
    ast.Gt: (">", "gt"),
    ast.GtE: (">=", "ge"),
    ast.Eq: ("==", "eq"),
    ast.NotEq: ("!=", "ne"),
}

_HEADER = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*$", re.ASCII)


def parse_header(text: str) -> tuple[str, tuple[str, ...]]:
    """Split the key of a named expression: `window(size)` gives `("window", ("size",))`."""
    match = _HEADER.match(text)
    if match is None:
        raise ExprError(f"a named expression is written NAME or NAME(PARAM, ...), got {text!r}", 1)
    params = tuple(p.strip() for p in match[2].split(",")) if match[2] is not None else ()
    for p in params:
        if not p.isidentifier():
            raise ExprError(f"a parameter must be an identifier, got {p!r} in {text!r}", 1)
    if len(set(params)) < len(params):
        raise ExprError(f"parameters must differ, got {text!r}", 1)
    return match[1], params


def check_syntax(text: str) -> None:
    """Raise `ExprError` if `text` is no Python expression. Names are checked where a named expression is used."""
    _tree(text)


def parse(text: str, scope: Scope, want: Type) -> Expr:
    """Parse `text` in `scope`; the result must be of type `want` (an integer is accepted as a float).

    Raises `ExprError` with the column (from 1) of the offending part of `text`.
    """
    e = _read(text, scope, want, allow_score=want is Type.FLOAT and scope.axes is None)
    e = expr.to_float(e) if want is Type.FLOAT else expr.without_kinks(e)
    for node in expr.walk(e):
        if _is_too_large(node) and not _is_infinite(node):  # to convert an integer makes none of these
            raise ExprError(_joined_problem(node, _flat(text)), 1)
    return e


def _read(text: str, scope: Scope, want: Type, *, allow_score: bool) -> Expr:
    """`parse`, but where a number is wanted an integer stays one."""
    tree = _tree(text)
    try:
        e = _Parser(text, scope, allow_score=allow_score).read(tree)
    except RecursionError:
        raise ExprError(_TOO_DEEP, 1) from None
    if e.type is not want and (want is not Type.FLOAT or e.type is Type.BOOL):
        raise ExprError(f"{_rule(scope, want)}, got {_article(e.type)}: {_flat(text)!r}{_remedy(e.type, want)}", 1)
    return e


def parse_example(text: str, tensor: TensorSpec) -> Expr:
    """The typical contents of a tensor: an expression over its own axes, of the type of its elements.

    >>> parse_example("kv_idx // 300", TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32")).type
    <Type.INT: 'integer'>
    """
    return parse(text, Scope(axes=tensor.axes), tensor.element)


def _rule(scope: Scope, want: Type) -> str:
    if scope.bound and scope.axes is not None:
        return "a dim must be an integer"
    if scope.axes is not None:
        kind = {Type.BOOL: "a bool", Type.INT: "an integer", Type.FLOAT: "a float"}[want]
        return f"the example of {kind} tensor must be {_KINDS[want]}"
    return f"{'a mask' if want is Type.BOOL else 'a score'} must be {_KINDS[want]}"


_KINDS = {Type.BOOL: "a boolean", Type.INT: "an integer", Type.FLOAT: "a number"}


def _remedy(got: Type, want: Type) -> str:
    """How to make one type of another, as the tail of an error message."""
    if want is Type.BOOL:
        return "; write a comparison"
    if got is Type.BOOL:
        return "; use where(condition, a, b)"
    return "; use // or int(...)"


def _article(t: Type) -> str:
    return f"an {t.value}" if t is Type.INT else f"a {t.value}"


MOST_NODES = 1000
"""The longest expression, written out: derivatives and block bounds are several times as long."""

_TOO_DEEP = "the expression is nested too deeply"


def _flat(text: str) -> str:
    """The expression on one line, as YAML lets it run over several."""
    return " ".join(line.strip() for line in text.strip().splitlines())


def _tree(text: str) -> ast.expr:
    flat = _flat(text)
    if "#" in flat:  # on one line a comment would swallow the lines after it
        raise ExprError(f"an expression cannot hold a comment: {flat!r}", flat.index("#") + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `5if` is a literal to Python, with a warning on the user's terminal
            return ast.parse(flat, mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes
        column = getattr(error, "offset", None) or len(flat) + 1  # 0: the text ended too early
        raise ExprError(f"not a Python expression: {flat!r} ({_said(error, flat, column)})", column) from None
    except (RecursionError, MemoryError):
        raise ExprError(_TOO_DEEP, 1) from None


_FOREIGN = {"&&": "and", "||": "or", "!": "not"}
"""Operators of other languages, and what an expression has in their place."""


def _said(error: SyntaxError | ValueError, flat: str, column: int) -> str:
    """What is wrong with the text at a column."""
    for symbol, word in _FOREIGN.items():
        # Python points at either character of an operator, depending on its version.
        if symbol in (flat[column - 1 :][: len(symbol)], flat[max(column - 2, 0) :][: len(symbol)]):
            return f"write '{word}' for '{symbol}'"
    return str(getattr(error, "msg", error))


class _Parser:
    def __init__(self, text: str, scope: Scope, *, allow_score: bool) -> None:
        self.utf8 = _flat(text).encode()
        self.scope = scope
        self.allow_score = allow_score
        self.reads_infinity = False  # so far, itself or by a named expression

    def fail(self, node: ast.AST, message: str) -> ExprError:
        before = self.utf8[: getattr(node, "col_offset", 0)]  # `ast` counts bytes
        return ExprError(message, len(before.decode()) + 1)

    def read(self, node: ast.expr) -> Expr:
        """The IR of a node; a number that a kernel's int32 or float32 cannot hold is an error."""
        e = self.read_node(node)
        # A literal `inf` is what it says; one that a sum or a product gives is a number too large.
        computed = isinstance(node, ast.BinOp) or (isinstance(node, ast.Constant) and isinstance(node.value, float))
        if isinstance(node, ast.Name | ast.Call) and not self.reads_infinity:
            self.reads_infinity = any(map(_is_infinite, expr.walk(e)))
        if _is_too_large(e) and (computed or not _is_infinite(e)):
            kind = "an integer" if e.type is Type.INT else "a number"
            bits = "32 bits" if e.type is Type.INT else "float32"
            raise self.fail(node, f"{kind} must fit {bits}, got {_source(node)}")
        for joined in expr.children(e):
            if _is_too_large(joined) and not (self.reads_infinity and _is_infinite(joined)):
                raise self.fail(node, _joined_problem(joined, _source(node)))
        if e.size > MOST_NODES:
            message = f"at most {MOST_NODES} operations and operands, named expressions written out, got {e.size}"
            raise self.fail(node, f"an expression has {message}: {_source(node)!r}")
        return e

    def read_node(self, node: ast.expr) -> Expr:
        match node:
            case ast.Constant(value=value) if isinstance(value, (bool, int, float)):
                return expr.const(value)
            case ast.Name(id=name):
                return self.read_name(node, name)
            case ast.UnaryOp(op=op, operand=operand):
                return self.read_unary(op, operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.read_binary(node, op, left, right)
            case ast.BoolOp(op=op, values=values):
                parts = [self.boolean(v, "and" if isinstance(op, ast.And) else "or") for v in values]
                return (expr.logical_and if isinstance(op, ast.And) else expr.logical_or)(*parts)
            case ast.Compare():
                return self.read_compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.read_where(node, test, body, orelse)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.read_call(node, name, args)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self.read_load(node, name, index)
        raise self.fail(node, f"{_source(node)!r} is not part of the expression language")

    def read_name(self, node: ast.expr, name: str) -> Expr:
        if name in self.scope.bound:
            return self.scope.bound[name]
        if self.scope.axes is not None:
            if name in self.scope.axes:
                return expr.int_var(name)
            raise self.not_an_axis(node)
        if name in INDEX_NAMES:
            return expr.int_var(name)
        if name in LENGTH_NAMES:
            return expr.int_var(name)
        if name == INFINITY:
            return expr.const(math.inf)
        if name == SCORE:
            if not self.allow_score:
                raise self.fail(node, "a mask cannot read 'score': it decides before any score is known")
            return expr.float_var(SCORE)
        if name in self.scope.scalars:
            kind = Type.INT if self.scope.scalars[name] is ScalarType.INT else Type.FLOAT
            return Var(kind, name)
        if name in self.scope.tensors:
            dims = self.scope.tensors[name].dims
            if not dims:
                return self.load(name, ())
            raise self.fail(node, f"tensor '{name}' must be indexed: {_example(name, dims)}")
        if name in self.scope.macros:
            return self.expand(node, name, [])
        if name in FUNCTIONS or name == "where":
            raise self.fail(node, f"'{name}' is a function and must be called: {name}(...)")
        known = [
            *INDEX_NAMES,
            *LENGTH_NAMES,
            INFINITY,
            *([SCORE] if self.allow_score else []),
            *self.scope.scalars,
            *self.scope.tensors,
        ]
        hint = did_you_mean(name, [*known, *self.scope.macros, *self.scope.bound])
        raise self.fail(
            node, f"unknown name '{name}'{hint}" + ("" if hint else "; declare it under tensors: or scalars:")
        )

    def not_an_axis(self, node: ast.expr) -> ExprError:
        if self.scope.bound:
            rule = "a dim is computed from int scalars, sizes and names that are a dim of their own of some tensor"
            return self.fail(node, f"{rule}, {' '.join(self.scope.bound)}; got {_source(node)!r}")
        axes = " ".join(self.scope.axes or ("of which it has none",))
        return self.fail(node, f"an example reads only its tensor's axes, {axes}; got {_source(node)!r}")

    def number(self, node: ast.expr, op: str) -> Expr:
        e = self.read(node)
        if e.type is Type.BOOL:
            raise self.not_a_number(node, op)
        return e

    def not_a_number(self, node: ast.expr, op: str) -> ExprError:
        return self.fail(node, f"'{op}' needs numbers, got the boolean {_source(node)!r}; use where(condition, a, b)")

    def boolean(self, node: ast.expr, op: str) -> Expr:
        e = self.read(node)
        if e.type is not Type.BOOL:
            got = f"{_article(e.type)}: {_source(node)!r}"
            raise self.fail(node, f"'{op}' needs booleans, got {got}; write a comparison")
        return e

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
        return expr.neg(self.number(operand, "-"))

    def read_binary(self, node: ast.BinOp, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        if type(op) in _BITS:
            return self.read_bits(op, left, right)
        if type(op) in _SHIFTS:
            return self.read_shift(op, left, right)
        if isinstance(op, ast.Pow):
            base, exponent = self.number(left, "**"), self.number(right, "**")
            if not isinstance(exponent, expr.Const):
                raise self.fail(
                    right, f"the exponent of '**' must be a literal number, got {_source(right)!r}; use exp and log"
                )
            if abs(exponent.value) > expr.MAX_EXPONENT:
                limits = f"from -{expr.MAX_EXPONENT} to {expr.MAX_EXPONENT}"
                raise self.fail(right, f"the exponent of '**' must be {limits}, got {exponent.value}")
            if expr.is_const(base, 0) and exponent.value < 0:
                raise self.fail(node, f"'**' divides by the constant zero in {_source(node)!r}")
            if base.type is Type.INT and (exponent.type is not Type.INT or exponent.value < 0):
                base = expr.to_float(base)
            return self.build(node, expr.power, base, exponent.value)
        if type(op) not in _BINARY:
            symbols = [entry[0] for table in (_BINARY, _BITS, _SHIFTS) for entry in table.values()]
            operators = " ".join([*symbols, "**"])
            raise self.fail(
                node,
                f"{_source(node)!r} uses an operator that is not part of the expression language; it has {operators}",
            )
        symbol, build = _BINARY[type(op)]
        a, b = self.number(left, symbol), self.number(right, symbol)
        if symbol in ("//", "%"):
            for side, e in ((left, a), (right, b)):
                if e.type is not Type.INT:
                    raise self.fail(side, f"'{symbol}' needs integers, got the float {_source(side)!r}; use int(...)")
        if symbol in ("/", "//", "%") and expr.is_const(b, 0):
            raise self.fail(right, f"'{symbol}' divides by the constant zero in {_source(node)!r}")
        return build(a, b)

    def read_bits(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        """`& | ^` of two booleans, or of two integers bit by bit."""
        symbol, of_booleans, of_integers = _BITS[type(op)]
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
        message = f"'{symbol}' needs booleans, or integers alone, got {_article(got)}: {_source(node)!r}"
        return self.fail(node, f"{message}; put comparisons beside '{symbol}' in parentheses")

    def read_shift(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Expr:
        symbol, build = _SHIFTS[type(op)]
        a, b = self.number(left, symbol), self.number(right, symbol)
        for side, e in ((left, a), (right, b)):
            if e.type is not Type.INT:
                raise self.fail(side, f"'{symbol}' needs integers, got the float {_source(side)!r}; use int(...)")
        if isinstance(b, expr.Const) and not 0 <= b.value <= expr.LAST_SHIFT:
            raise self.fail(right, f"'{symbol}' shifts by 0 to {expr.LAST_SHIFT} bits, got {b.value}")
        return build(a, b)

    def is_bare(self, node: ast.expr) -> bool:
        """Whether a part of the expression stands in no parentheses of its own."""
        before, after = self.utf8[: node.col_offset].rstrip(), self.utf8[node.end_col_offset :].lstrip()
        return not (before.endswith(b"(") and after.startswith(b")"))

    def read_compare(self, node: ast.Compare) -> Expr:
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and len(node.ops) == 1:
            found = self.read_membership(node.left, node.comparators[0])
            return found if isinstance(node.ops[0], ast.In) else expr.logical_not(found)
        if not all(type(op) in _COMPARE for op in node.ops):
            raise self.fail(node, f"{_source(node)!r}: only < <= > >= == != compare values, and one 'in' alone")
        symbols = [_COMPARE[type(op)][0] for op in node.ops]
        sides = [node.left, *node.comparators]
        values = [self.read(side) for side in sides]
        for side, e in zip(sides, values, strict=True):
            if isinstance(side, ast.BinOp) and type(side.op) in _BITS and e.type is Type.INT and self.is_bare(side):
                # Few know that `a < b & c < d` is `a < (b & c) < d`.
                symbol = _BITS[type(side.op)][0]
                message = f"'{symbol}' binds tighter than the comparison beside it: {_source(side)!r}"
                raise self.fail(side, f"{message}; put the booleans, or the integers, that it joins in parentheses")
        if not (set(symbols) <= {"==", "!="} and {e.type for e in values} == {Type.BOOL}):
            for side, e, symbol in zip(sides, values, [symbols[0], *symbols], strict=True):
                if e.type is Type.BOOL:
                    raise self.not_a_number(side, symbol)
        pairs = zip(node.ops, values, values[1:], strict=False)
        return expr.logical_and(*(expr.compare(_COMPARE[type(op)][1], a, b) for op, a, b in pairs))

    def read_membership(self, node: ast.expr, members: ast.expr) -> Expr:
        """Whether an integer is one of a list: of literals, or the last dim of a tensor, an integer."""
        member = self.read(node)
        if member.type is not Type.INT:
            remedy = _remedy(member.type, Type.INT)
            raise self.fail(node, f"'in' needs an integer, got {_article(member.type)}: {_source(node)!r}{remedy}")
        return expr.logical_or(*(expr.compare("eq", member, e) for e in self.read_members(members)))

    def read_members(self, node: ast.expr) -> list[Expr]:
        if isinstance(node, (ast.Tuple, ast.List)):
            found = [self.read(element) for element in node.elts]
            for element, e in zip(node.elts, found, strict=True):
                if e.type is not Type.INT:
                    raise self.fail(element, f"'in' needs integers, got {_article(e.type)}: {_source(element)!r}")
            return found
        name, index = (node.value, node.slice) if isinstance(node, ast.Subscript) else (node, None)
        if not (isinstance(name, ast.Name) and name.id in self.scope.tensors):
            raise self.fail(node, f"'in' needs a list of integers or a tensor that holds one, got {_source(node)!r}")
        tensor = self.scope.tensors[name.id]
        last = tensor.dims[-1] if tensor.dims else None
        if not isinstance(last, int) or last > MOST_MEMBERS or tensor.element is not Type.INT:
            got = f"dims [{', '.join(map(str, tensor.dims))}] of {tensor.dtype}"
            rule = f"of integers whose last dim, the list, is an integer up to {MOST_MEMBERS}"
            raise self.fail(node, f"'in' needs a tensor {rule}; '{name.id}' has {got}")
        items = [] if index is None else index.elts if isinstance(index, ast.Tuple) else [index]
        if len(items) != len(tensor.dims) - 1:
            wanted = _example(name.id, tensor.dims[:-1]) if len(tensor.dims) > 1 else name.id
            message = f"'in' takes the last dim of '{name.id}' as its list: index the {len(tensor.dims) - 1} before it"
            raise self.fail(node, f"{message}, {wanted}; got {len(items)}")
        indices = tuple(self.read_index(name.id, item) for item in items)
        return [self.load(name.id, (*indices, expr.const(i))) for i in range(last)]

    def read_where(self, node: ast.expr, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Expr:
        condition, a, b = self.boolean(test, "where"), self.read(body), self.read(orelse)
        if (a.type is Type.BOOL) != (b.type is Type.BOOL):
            raise self.fail(
                node, f"both arms of 'where' must be numbers or both booleans, got {a.type.value} and {b.type.value}"
            )
        return expr.where(condition, a, b)

    def read_call(self, node: ast.Call, name: str, args: list[ast.expr]) -> Expr:
        if name in self.scope.macros:
            return self.expand(node, name, args)
        if name == "where":
            if len(args) != 3:
                raise self.fail(node, f"where(condition, a, b) takes 3 arguments, got {len(args)}")
            return self.read_where(node, *args)
        if name not in FUNCTIONS:
            if name in self.scope.tensors:
                dims = self.scope.tensors[name].dims
                raise self.fail(node, f"tensor '{name}' is indexed, not called: {_example(name, dims)}")
            hint = did_you_mean(name, [*FUNCTIONS, "where", *self.scope.macros])
            remedy = hint or f"; the functions are {' '.join(sorted([*FUNCTIONS, 'where']))}"
            raise self.fail(node, f"'{name}' is no function of the expression language{remedy}")
        fewest, most, build = FUNCTIONS[name]
        if not fewest <= len(args) <= most:
            wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise self.fail(node, f"{name}() takes {wanted} argument{'s' * (wanted != '1')}, got {len(args)}")
        return self.build(node, build, *(self.number(a, name) for a in args))

    def build(self, node: ast.expr, build: Callable[..., Expr], *args: Any) -> Expr:
        """`build(*args)`, where literals may have no value."""
        try:
            return build(*args)
        except (ValueError, OverflowError):
            raise self.fail(node, f"{_source(node)!r} has no finite value") from None

    def read_load(self, node: ast.Subscript, name: str, index: ast.expr) -> Expr:
        if self.scope.axes is not None:
            raise self.not_an_axis(node)
        if name not in self.scope.tensors:
            hint = did_you_mean(name, self.scope.tensors) or "; declare it under tensors:"
            raise self.fail(node, f"'{name}' is no tensor of this variant{hint}")
        items = index.elts if isinstance(index, ast.Tuple) else [index]
        dims = self.scope.tensors[name].dims
        if len(items) != len(dims):
            raise self.fail(
                node,
                f"tensor '{name}' has {len(dims)} dim{'s' * (len(dims) != 1)} and must be indexed with as many, "
                f"got {len(items)}: {_example(name, dims)}",
            )
        return self.load(name, tuple(self.read_index(name, item) for item in items))

    def read_index(self, tensor: str, item: ast.expr) -> Expr:
        e = self.read(item)
        if e.type is not Type.INT:
            got = f"{_article(e.type)}: {_source(item)!r} in '{tensor}'"
            raise self.fail(item, f"an index must be an integer, got {got}{_remedy(e.type, Type.INT)}")
        if SCORE in expr.names(e):
            raise self.fail(item, f"an index of '{tensor}' cannot depend on 'score'")
        return e

    def load(self, name: str, indices: tuple[Expr, ...]) -> Load:
        return Load(self.scope.tensors[name].element, name, indices)

    def expand(self, node: ast.expr, name: str, args: list[ast.expr]) -> Expr:
        macro = self.scope.macros[name]
        if len(args) != len(macro.params):
            usage = f"{name}({', '.join(macro.params)})" if macro.params else name
            wanted = f"{len(macro.params)} argument{'s' * (len(macro.params) != 1)}"
            raise self.fail(node, f"'{name}' takes {wanted}, got {len(args)}; write {usage}")
        if name in self.scope.expanding:
            raise self.fail(node, f"'{name}' is defined by itself: {' -> '.join((*self.scope.expanding, name))}")
        bound = {param: self.read(a) for param, a in zip(macro.params, args, strict=True)}
        use = (name, self.allow_score, *bound.values())
        if use in self.scope.expanded:
            return self.scope.expanded[use]
        scope = replace(self.scope, bound=bound, expanding=(*self.scope.expanding, name))
        try:
            allow_score = self.allow_score and macro.type is Type.FLOAT
            self.scope.expanded[use] = _read(macro.body, scope, macro.type, allow_score=allow_score)
            return self.scope.expanded[use]
        except ExprError as error:
            raise self.fail(node, f"in '{name}': {error.message}") from None


def _joined_problem(literal: expr.Const, source: str) -> str:
    kind, bits = ("an integer", "32 bits") if literal.type is Type.INT else ("a number", "float32")
    return f"{kind} must fit {bits}, got {literal.value} by joining the literals of {source!r}"


def _fits(value: int | float | bool) -> bool:
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return value == 0 or 2.0**-126 <= abs(value) < 2.0**128


def _is_too_large(e: Expr) -> TypeGuard[expr.Const]:
    """Whether it is a literal that 32 bits, or float32, do not hold."""
    return isinstance(e, expr.Const) and not _fits(e.value)


def _is_infinite(e: Expr) -> bool:
    return isinstance(e, expr.Const) and abs(e.value) == math.inf


def _source(node: ast.AST) -> str:
    """The text of a part of an expression, shortened for a message."""
    try:
        text = ast.unparse(node)
    except ValueError:  # Python prints no integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _example(name: str, dims: tuple[str | int, ...]) -> str:
    return f"{name}[{', '.join(d if isinstance(d, str) else 'i' + str(n) for n, d in enumerate(dims))}]"
