"""Text to IR: a Python expression, read with `ast` and never evaluated, checked against the names in scope.

>>> from codegen.ir.expr import Type
>>> e = parse("q_idx >= kv_idx and q_idx - kv_idx < 4096", Scope(), Type.BOOL)
>>> e.op, len(e.args)
('and', 2)
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace

from codegen.ir import expr, remedies
from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, SCORE, Const, Expr, Load, ScalarType, TensorSpec, Type, Var
from codegen.ir.language import FUNCTIONS, INFINITY, MOST_MEMBERS, Macro, Scope
from codegen.ir.operators import OperatorReader
from codegen.ir.syntax import (
    KINDS,
    TOO_DEEP,
    check_syntax,
    indexing_example,
    is_infinite,
    is_too_large,
    joined_problem,
    on_one_line,
    parse_header,
    source,
    syntax_tree,
    type_remedy,
    with_article,
)
from codegen.util.errors import ExprError, did_you_mean

__all__ = [
    "FUNCTIONS",
    "INFINITY",
    "MOST_MEMBERS",
    "MOST_NODES",
    "Macro",
    "Scope",
    "check_syntax",
    "parse",
    "parse_example",
    "parse_header",
]

MOST_NODES = 1000
"""Longest expression, as written out. Derivatives and block bounds are several times as long."""


def parse(text: str, scope: Scope, want: Type) -> Expr:
    """Parse `text` in `scope`; the result must be of type `want` (an integer is accepted as a float).

    Raises `ExprError` with the column (from 1) of the offending part of `text`.
    """
    e = _read(text, scope, want, allow_score=want is Type.FLOAT and scope.axes is None)
    e = expr.to_float(e) if want is Type.FLOAT else expr.without_kinks(e)
    for node in expr.walk(e):
        if is_too_large(node) and not is_infinite(node):  # an infinity was written as such
            raise ExprError(joined_problem(node, on_one_line(text)), 1)
    return e


def parse_example(text: str, tensor: TensorSpec) -> Expr:
    """The typical contents of a tensor: an expression over its own axes, of the type of its elements.

    >>> parse_example("kv_idx // 300", TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32")).type
    <Type.INT: 'integer'>
    """
    return parse(text, Scope(axes=tensor.axes), tensor.element)


def _read(text: str, scope: Scope, want: Type, *, allow_score: bool) -> Expr:
    """`parse` without the final conversion: where a float is wanted, an integer stays an integer."""
    tree = syntax_tree(text)
    try:
        e = Reader(text, scope, allow_score=allow_score).read(tree)
    except RecursionError:
        raise ExprError(TOO_DEEP, 1) from None
    if e.type is not want and (want is not Type.FLOAT or e.type is Type.BOOL):
        raise ExprError(
            f"{_rule(scope, want)}, got {with_article(e.type)}: {on_one_line(text)!r}{type_remedy(e.type, want)}", 1
        )
    return e


def _rule(scope: Scope, want: Type) -> str:
    """The rule that an expression of another type breaks."""
    if scope.bound and scope.axes is not None:
        return "a dim must be an integer"
    if scope.axes is not None:
        kind = {Type.BOOL: "a bool", Type.INT: "an integer", Type.FLOAT: "a float"}[want]
        return f"the example of {kind} tensor must be {KINDS[want]}"
    return f"{'a mask' if want is Type.BOOL else 'a score'} must be {KINDS[want]}"


class Reader(OperatorReader):
    """The parser: one method for each kind of syntax node."""

    def __init__(self, text: str, scope: Scope, *, allow_score: bool) -> None:
        super().__init__(text, scope)
        self.allow_score = allow_score
        self.reads_infinity = False  # True once the text, or a named expression in it, has read `inf`

    def read(self, node: ast.expr) -> Expr:
        """The IR of a node. A literal that does not fit a kernel's int32 or float32 is an error."""
        e = self.read_node(node)
        # `inf` written as such is legal; an infinite sum or product is a number that is too large.
        computed = isinstance(node, ast.BinOp) or (isinstance(node, ast.Constant) and isinstance(node.value, float))
        if isinstance(node, ast.Name | ast.Call) and not self.reads_infinity:
            self.reads_infinity = any(map(is_infinite, expr.walk(e)))
        if is_too_large(e) and (computed or not is_infinite(e)):
            kind = "an integer" if e.type is Type.INT else "a number"
            bits = "32 bits" if e.type is Type.INT else "float32"
            raise self.fail(node, f"{kind} must fit {bits}, got {source(node)}")
        for joined in expr.children(e):
            if is_too_large(joined) and not (self.reads_infinity and is_infinite(joined)):
                raise self.fail(node, joined_problem(joined, source(node)))
        if e.size > MOST_NODES:
            message = f"at most {MOST_NODES} operations and operands, named expressions written out, got {e.size}"
            raise self.fail(node, f"an expression has {message}: {source(node)!r}")
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
        raise self.fail(node, f"{source(node)!r} is not part of the expression language{remedies.for_syntax(node)}")

    def read_name(self, node: ast.expr, name: str) -> Expr:
        """The expression that a name stands for. The order of the tests decides which name shadows which."""
        if name in self.scope.bound:
            return self.scope.bound[name]
        if self.scope.axes is not None:
            if name in self.scope.axes:
                return expr.int_var(name)
            raise self.not_an_axis(node)
        if name in INDEX_NAMES or name in LENGTH_NAMES:
            return expr.int_var(name)
        if name == INFINITY:
            return expr.const(math.inf)
        if name == SCORE:
            if not self.allow_score:
                message = f"a mask cannot read 'score': it decides before any score is known{remedies.MASK_ON_SCORE}"
                raise self.fail(node, message)
            return expr.float_var(SCORE)
        if name in self.scope.scalars:
            kind = Type.INT if self.scope.scalars[name] is ScalarType.INT else Type.FLOAT
            return Var(kind, name)
        if name in self.scope.tensors:
            dims = self.scope.tensors[name].dims
            if not dims:
                return self.load(name, ())
            raise self.fail(node, f"tensor '{name}' must be indexed: {indexing_example(name, dims)}")
        if name in self.scope.macros:
            return self.expand(node, name, [])
        if name in FUNCTIONS or name == "where":
            raise self.fail(node, f"'{name}' is a function and must be called: {name}(...)")
        raise self.unknown(node, name)

    def unknown(self, node: ast.expr, name: str) -> ExprError:
        scope = self.scope
        known = [*INDEX_NAMES, *LENGTH_NAMES, INFINITY, *([SCORE] if self.allow_score else [])]
        hint = did_you_mean(name, [*known, *scope.scalars, *scope.tensors, *scope.macros, *scope.bound])
        hint = remedies.for_name(name) or hint or "; declare it under tensors: or scalars:"
        return self.fail(node, f"unknown name '{name}'{hint}", name)

    def not_an_axis(self, node: ast.expr) -> ExprError:
        if self.scope.bound:
            rule = "a dim is computed from int scalars, sizes and names that are a dim of their own of some tensor"
            return self.fail(node, f"{rule}, {' '.join(self.scope.bound)}; got {source(node)!r}")
        axes = " ".join(self.scope.axes or ("of which it has none",))
        return self.fail(node, f"an example reads only its tensor's axes, {axes}; got {source(node)!r}")

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
                raise self.fail(node, f"tensor '{name}' is indexed, not called: {indexing_example(name, dims)}")
            hint = remedies.for_function(name) or did_you_mean(name, [*FUNCTIONS, "where", *self.scope.macros])
            remedy = hint or f"; the functions are {' '.join(sorted([*FUNCTIONS, 'where']))}"
            raise self.fail(node, f"'{name}' is no function of the expression language{remedy}", name)
        fewest, most, build = FUNCTIONS[name]
        if not fewest <= len(args) <= most:
            wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise self.fail(node, f"{name}() takes {wanted} argument{'s' * (wanted != '1')}, got {len(args)}")
        return self.build(node, build, *(self.number(a, name) for a in args))

    def read_load(self, node: ast.Subscript, name: str, index: ast.expr) -> Expr:
        if self.scope.axes is not None:
            raise self.not_an_axis(node)
        if name not in self.scope.tensors:
            hint = remedies.for_indexed(name) or did_you_mean(name, self.scope.tensors) or "; declare it under tensors:"
            raise self.fail(node, f"'{name}' is no tensor of this variant{hint}", name, indexed=True)
        items = index.elts if isinstance(index, ast.Tuple) else [index]
        dims = self.scope.tensors[name].dims
        if len(items) != len(dims):
            raise self.fail(
                node,
                f"tensor '{name}' has {len(dims)} dim{'s' * (len(dims) != 1)} and must be indexed with as many, "
                f"got {len(items)}: {indexing_example(name, dims)}",
            )
        return self.load(name, tuple(self.read_index(name, item, dim) for item, dim in zip(items, dims, strict=True)))

    def read_index(self, tensor: str, item: ast.expr, dim: str | int) -> Expr:
        e = self.read(item)
        if e.type is not Type.INT:
            got = f"{with_article(e.type)}: {source(item)!r} in '{tensor}'"
            raise self.fail(item, f"an index must be an integer, got {got}{type_remedy(e.type, Type.INT)}")
        if SCORE in expr.names(e):
            raise self.fail(item, f"an index of '{tensor}' cannot depend on 'score'")
        if isinstance(e, Const) and (e.value < 0 or (isinstance(dim, int) and e.value >= dim)):
            inside = f"from 0 to {dim - 1}" if isinstance(dim, int) else "of 0 or more"
            raise self.fail(item, f"an index of '{tensor}' must be a number {inside} here, got {e.value}")
        return expr.without_kinks(e)

    def load(self, name: str, indices: tuple[Expr, ...]) -> Load:
        return Load(self.scope.tensors[name].element, name, indices)

    def expand(self, node: ast.expr, name: str, args: list[ast.expr]) -> Expr:
        """The body of a named expression, with its arguments in place of its parameters."""
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
            within = (name, *error.within)
            raise self.fail(
                node, f"in '{name}': {error.message}", error.unknown, within, indexed=error.indexed
            ) from None
