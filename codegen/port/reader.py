"""Reads expressions of a FlexAttention file as values: an abstract interpreter that calls only the file's functions."""

from __future__ import annotations

import ast
from dataclasses import replace

from codegen.port.branches import either_of
from codegen.port.calls import BUILTINS, NO_SIZES, CallReader
from codegen.port.functions import CONSTANTS, DTYPES, KNOWN, REDUCTIONS, is_reshaped, known_truth
from codegen.port.same import fingerprint
from codegen.port.sequences import MOST_ITEMS, UNKNOWN_LIST
from codegen.port.values import (
    Captured,
    Constant,
    Failed,
    Joined,
    Kind,
    Library,
    Method,
    Scope,
    Several,
    Symbol,
    TranslationError,
    Undecided,
    UndecidedError,
    Value,
    literal,
)

LIBRARIES = ("torch", "math", "functools")
"""Modules that a snippet may use without an import."""

IMPORTED = ("and_masks", "or_masks", "noop_mask", "create_block_mask", "flex_attention", "partial")
"""Functions that it may use without an import."""

NO_DICTS = "entries of a dict are not read; give the value a name of its own"
DATA_BRANCH = "the branch depends on data, which FlexAttention cannot trace either; use torch.where"
FLAG_BRANCH = (
    "the branch depends on a value that this file does not give; write it as a constant, or add a call that gives it to"
    " the function around the mod"
)


class ExpressionReader(CallReader):
    """Values of expressions."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.defaults_read: set[str] = set()
        self.assigned: dict[str, dict[str, tuple[ast.expr, Value | None]]] = {}
        """Path of an attribute -> the expressions that the file assigns to it, by their source, and their values."""
        self.classes: list[Scope] = []
        """The names in the bodies of the file's classes."""
        self.attributes_read: dict[str, Constant] = {}
        """Path of an attribute -> the flag or text that the file assigns to it, and that a mod reads."""
        self.outdated: list[Several] = []
        """Lists as they were before the file changed them."""
        self.visited: set[ast.expr] = set()
        """The calls and lambdas that were read since a statement began."""

    def read(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression; raises `TranslationError`."""
        match node:
            case ast.Constant(value=value):
                return Constant(value)
            case ast.Name(id=name):
                return self._name(node, name, scope)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(node, self.read(owner, scope), name)
            case ast.Subscript(value=owner, slice=index):
                return self._subscript(node, self.read(owner, scope), index, scope)
            case ast.UnaryOp(op=op, operand=operand):
                return self.unary(op, self.read(operand, scope), node)
            case ast.BinOp(left=left, op=op, right=right):
                one, other = self.read(left, scope), self.read(right, scope)
                if isinstance(op, ast.Add) and isinstance(one, Several) and isinstance(other, Several):
                    return Several((*one.items, *other.items))
                return self.binary(op, one, other, node)
            case ast.BoolOp(op=op, values=values):
                return self.all_of(isinstance(op, ast.And), self._until_decided(op, values, scope), node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self.compare(ops, [self.read(value, scope) for value in (left, *others)], node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._conditional(test, body, orelse, node, scope)
            case ast.Lambda():
                self.visited.add(node)
                return self.note(self.closure(node, scope, f"lambda_{node.lineno}"), node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return Several(tuple(self.read(item, scope) for item in items))
            case ast.ListComp(elt=element, generators=[loop]) | ast.GeneratorExp(elt=element, generators=[loop]):
                return self._comprehension(element, loop, scope)
            case ast.Call(func=function, args=args, keywords=keywords):
                self.visited.add(node)
                return self.note(self._call(node, function, args, keywords, scope), node)
        raise TranslationError(node, "this syntax has no counterpart in the expression language")

    def note(self, value: Value, node: ast.expr) -> Value:
        """The value of a call or a lambda, which readers of mods keep."""
        raise NotImplementedError

    def imported(self, library: Library, node: ast.AST) -> Value:
        """The value of a name that another module defines: the name itself if that module is not read."""
        raise NotImplementedError

    def decided(self, test: ast.expr, scope: Scope) -> bool:
        """The truth of a condition that constants decide; raises `TranslationError` for any other condition."""
        found = self.condition(test, scope)
        if isinstance(found, bool):
            return found
        raise UndecidedError(test, FLAG_BRANCH)

    def condition(self, test: ast.expr, scope: Scope) -> bool | Symbol:
        """A condition: its truth if constants decide it, or an expression of scalars that each call gives. Raises
        `TranslationError` for any other condition."""
        value = self.read(test, scope)
        truth = known_truth(value)
        if truth is not None:
            return truth
        if isinstance(value, Failed):
            raise TranslationError(None)
        if isinstance(value, Captured) and not value.indices and value.annotation in ("int", "float"):
            value = self.compare([ast.NotEq()], [value, Constant(0)], test)
        if not isinstance(value, Symbol):
            raise UndecidedError(test, FLAG_BRANCH)
        nodes = list(ast.walk(value.node))
        reads = {node.id for node in nodes if isinstance(node, ast.Name)}
        if reads & {"score", "b", "h", "q_idx", "kv_idx"}:
            raise UndecidedError(test, DATA_BRANCH)
        if value.kind is not Kind.BOOL or any(isinstance(node, ast.Subscript) for node in nodes):
            raise UndecidedError(test, FLAG_BRANCH)
        return value

    def _until_decided(self, op: ast.boolop, nodes: list[ast.expr], scope: Scope) -> list[Value]:
        """The operands of `and` or `or`, up to the first one that decides: Python does not read the others."""
        values: list[Value] = []
        for node in nodes:
            values.append(self.read(node, scope))
            if known_truth(values[-1]) is isinstance(op, ast.Or):
                break
        return values

    def _conditional(self, test: ast.expr, body: ast.expr, orelse: ast.expr, node: ast.expr, scope: Scope) -> Value:
        """`body if test else orelse`."""
        found = self.condition(test, scope)
        if isinstance(found, bool):
            return self.read(body if found else orelse, scope)
        return self.either(found, self.read(body, scope), self.read(orelse, scope), node)

    def either(self, condition: Symbol, first: Value, second: Value, node: ast.AST) -> Value:
        """`first` if a condition of scalars holds, else `second`."""
        a, b = self.symbol(first, node), self.symbol(second, node)
        if a.kind is b.kind is Kind.BOOL:
            return either_of(condition, a, b)
        return self.where(condition, first, second, node)

    def _comprehension(self, element: ast.expr, loop: ast.comprehension, scope: Scope) -> Several:
        """The items of `[element for target in a known list]`."""
        items: list[Value] = []
        inner = Scope(scope)  # one for all rounds: a lambda reads the last value of the loop's name, as in Python
        context = self.context
        try:
            for item in self.items(loop.iter, scope):
                self.context = context
                self.context = self.round_of(item)
                self.assign_value(loop.target, item, inner)
                if all(self.decided(test, inner) for test in loop.ifs):
                    items.append(self.read(element, inner))
        finally:
            self.context = context
        return Several(tuple(items))

    def round_of(self, item: Value) -> str:
        """The context of what a loop computes of an item."""
        return f"{self.context}, {fingerprint(item)}"

    def items(self, node: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """The items that a loop goes through, if the file gives them."""
        value = self.read(node, scope)
        if not isinstance(value, Several) or len(value.items) > MOST_ITEMS:
            raise TranslationError(node, UNKNOWN_LIST)
        return value.items

    def assign_value(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Give the names of a target a value that was read."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, Several):
            if len(target.elts) != len(value.items):
                raise TranslationError(target, "the number of values differs from the number of names")
            for one, item in zip(target.elts, value.items, strict=True):
                self.assign_value(one, item, scope)
        else:
            raise TranslationError(target, "this takes apart what is not known to be several values")

    # ------------------------------------------------------------------------------------------------ names and indices

    def _name(self, node: ast.Name, name: str, scope: Scope) -> Value:
        value = scope.find(name)
        if isinstance(value, Library):
            value = self.imported(value, node)
        if isinstance(value, Failed):
            raise TranslationError(None)
        if isinstance(value, Undecided):
            raise UndecidedError(node, value.reason)
        if any(value is before for before in self.outdated):
            return Captured(name)
        if isinstance(value, Constant) and value.default_of:
            self.defaults_read.add(value.default_of)
        if value is not None:
            return value
        if name == "noop_mask":
            return Joined(True, (), "noop")
        if name in LIBRARIES or name in IMPORTED or name in BUILTINS:
            return Library(name)
        if name == "F":
            return Library("torch.nn.functional")
        # A name that the snippet does not define is a tensor or scalar of the caller.
        return Captured(name)

    def _attribute(self, node: ast.Attribute, owner: Value, name: str, *, is_called: bool = False) -> Value:
        if isinstance(owner, Library):
            if name in CONSTANTS and owner.last in ("torch", "math", "numpy", "np"):
                return Constant(CONSTANTS[name])
            if name == "noop_mask":
                return Joined(True, (), "noop")
            return self.imported(Library(f"{owner.path}.{name}", owner.importer), node)
        if name == "dtype" and isinstance(owner, Symbol) and owner.kind in DTYPES:
            return Library(f"torch.{DTYPES[owner.kind]}")
        if name in ("dtype", "device"):
            return Library(name)
        is_method = name in KNOWN or name in REDUCTIONS or name == "size"
        # `self.size` is an attribute of the file's module, `x.size(0)` is not.
        if is_method and (is_called or not isinstance(owner, Captured)):
            return Method(owner, name)
        if name in ("shape", "ndim"):
            raise TranslationError(node, NO_SIZES)
        if isinstance(owner, Captured) and not owner.indices:
            found = Captured(name, owner=owner.path)
            constant = self._attribute_constant(owner, found)
            if constant is not None:
                return constant
            assigned = list(self.assigned.get(found.path, {}).values())
            made_by, value = assigned[0] if len(assigned) == 1 else (None, None)
            if value is not None and not isinstance(value, Constant):
                return value
            return replace(found, made_by=made_by) if isinstance(made_by, ast.Call) else found
        raise TranslationError(node, f"'.{name}' has no counterpart in the expression language")

    def _attribute_constant(self, owner: Captured, found: Captured) -> Constant | None:
        """The value that the file gives an attribute once: of a class, or a flag or text that `__init__` sets."""
        assigned = [value for _, value in self.assigned.get(found.path, {}).values()]
        if owner.attributes is not None:
            value = owner.attributes.names.get(found.name)
            return value if isinstance(value, Constant) else None
        is_of_class = any(found.name in attributes.names for attributes in self.classes)
        if is_of_class or len(assigned) != 1 or not isinstance(assigned[0], Constant):
            return None
        self.attributes_read[found.path] = assigned[0]
        return assigned[0]

    def _subscript(self, node: ast.Subscript, owner: Value, index: ast.expr, scope: Scope) -> Value:
        if isinstance(owner, Symbol) and owner.alias is not None:
            owner = owner.alias
        if isinstance(owner, Several | Captured):
            items = index.elts if isinstance(index, ast.Tuple) else [index]
            if any(isinstance(item, ast.Slice) or ast.unparse(item) == "None" for item in items):
                raise TranslationError(node, "a tensor is indexed with one integer per dim, not with slices")
            values = [self.read(item, scope) for item in items]
            is_text = any(isinstance(value, Constant) and isinstance(value.value, str) for value in values)
            if is_text or (isinstance(owner, Captured) and isinstance(owner.made_by, ast.Dict | ast.DictComp)):
                raise TranslationError(node, NO_DICTS)
            if isinstance(owner, Several) and len(values) == 1 and isinstance(values[0], Constant):
                place = values[0].value
                if isinstance(place, int) and -len(owner.items) <= place < len(owner.items):
                    return owner.items[place]
            if isinstance(owner, Captured):
                if owner.annotation in ("int", "float", "bool"):
                    raise TranslationError(
                        node, f"'{owner.name}' is annotated as {owner.annotation}, and indexed as a tensor"
                    )
                if any(isinstance(x, Constant) and isinstance(x.value, int) and x.value < 0 for x in values):
                    raise TranslationError(
                        node, "an index below 0 counts from the end in torch; here it would read the first element"
                    )
                if owner.indices and is_reshaped(node.value):
                    raise TranslationError(node, "the shape of a tensor changes between its indices; index it once")
                found = tuple(self.integer(value, node, "an index").node for value in values)
                return replace(owner, indices=(*owner.indices, *found))
        raise TranslationError(node, "only tensors of the caller are indexed; compute this one before the call")

    def _call(
        self, node: ast.Call, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> Value:
        if isinstance(function, ast.Attribute):
            owner = self.read(function.value, scope)
            called = self._attribute(function, owner, function.attr, is_called=True)
        else:
            called = self.read(function, scope)
        return self.call_value(node, called, args, keywords, scope)


def default_number(node: ast.expr | None) -> int | float | None:
    """The number of a default that is a literal number, such as -1, else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = default_number(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool) and isinstance(node.value, int | float):
        return None if literal(node.value) is None else node.value
    return None
