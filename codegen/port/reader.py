"""Reads expressions of a FlexAttention file as values: an abstract interpreter that calls only the file's functions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from codegen.port.functions import CONSTANTS, DTYPES, KNOWN, REDUCTIONS, Functions, is_reshaped
from codegen.port.syntax import rebound_in
from codegen.port.values import (
    Captured,
    Closure,
    Constant,
    Failed,
    Function,
    Joined,
    Kind,
    Library,
    Method,
    Mod,
    Scope,
    Several,
    Symbol,
    TranslationError,
    Undecided,
    UndecidedError,
    Unread,
    Value,
    is_score,
    literal,
)

INDEX_ARGUMENTS = tuple(Symbol(ast.Name(name), Kind.INT) for name in ("b", "h", "q_idx", "kv_idx"))
SCORE_ARGUMENT = Symbol(ast.Name("score"), Kind.FLOAT)

LIBRARIES = ("torch", "math", "functools")
"""Modules that a snippet may use without an import."""

IMPORTED = ("and_masks", "or_masks", "noop_mask", "create_block_mask", "flex_attention", "partial")
"""Functions that it may use without an import."""
DECORATORS = ("staticmethod", "classmethod", "property")
BUILTINS = (
    *("abs", "min", "max", "int", "float", "bool", "round", "pow", "len", "range", "print", "isinstance"),
    *DECORATORS,
)
KEPT_FUNCTION = (
    *("compile", "lru_cache", "cache", "cached_property", "wraps", "update_wrapper", "vmap", *DECORATORS),
    *("no_grad", "inference_mode", "script", "disable", "allow_in_graph", "abstractmethod", "override", "final"),
)
"""Functions that return the function they are given, without a change that matters to a mod."""
KEEPERS = ("torch", "functools", "abc", "typing", "typing_extensions")
"""Modules that these functions come from, if they are not built in."""

NO_DICTS = "entries of a dict are not read; give the value a name of its own"
NO_STARS = "arguments are written one by one, not with * or **"
NO_SIZES = "the size of a tensor is not known; the call's lengths are q_len and kv_len in an entry"

MOST_CALLS = 40
"""Deepest nesting of calls. An endless recursion is an error; FlexAttention could not trace it either."""


class ExpressionReader(Functions):
    """Values of expressions."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.depth = 0
        self.strict = False
        self.defaults_read: set[str] = set()
        self.assigned: dict[str, dict[str, tuple[ast.expr, Value | None]]] = {}
        """Path of an attribute -> the expressions that the file assigns to it, by their source, and their values."""
        self.outdated: list[Several] = []
        """Lists as they were before the file changed them."""
        self.visited: set[ast.expr] = set()
        """The calls and lambdas that were read since a statement began."""
        self.rebound: dict[Function, frozenset[str]] = {}
        """Function -> the names of its scope that other functions assign."""

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
                return self.binary(op, self.read(left, scope), self.read(right, scope), node)
            case ast.BoolOp(op=op, values=values):
                return self.all_of(isinstance(op, ast.And), [self.read(value, scope) for value in values], node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self.compare(ops, [self.read(value, scope) for value in (left, *others)], node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.read(body if self.decided(test, scope) else orelse, scope)
            case ast.Lambda():
                self.visited.add(node)
                return self.note(Closure(node, scope, f"lambda_{node.lineno}"), node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return Several(tuple(self.read(item, scope) for item in items))
            case ast.Call(func=function, args=args, keywords=keywords):
                self.visited.add(node)
                return self.note(self._call(node, function, args, keywords, scope), node)
        raise TranslationError(node, "this syntax has no counterpart in the expression language")

    def note(self, value: Value, node: ast.expr) -> Value:
        """The value of a call or a lambda, which readers of mods keep."""
        raise NotImplementedError

    def decided(self, test: ast.expr, scope: Scope) -> bool:
        """The truth of a condition that constants decide; raises `TranslationError` for any other condition."""
        value = self.read(test, scope)
        if isinstance(value, Constant | Several):
            return bool(value.value if isinstance(value, Constant) else value.items)
        if isinstance(value, Closure | Joined | Unread):
            return True
        if isinstance(value, Failed):
            raise TranslationError(None)
        reads = (
            {name.id for name in ast.walk(value.node) if isinstance(name, ast.Name)}
            if isinstance(value, Symbol)
            else set()
        )
        if reads & {"score", "b", "h", "q_idx", "kv_idx"}:
            raise UndecidedError(
                test, "the branch depends on data, which FlexAttention cannot trace either; use torch.where"
            )
        raise UndecidedError(test, "the branch depends on a value that is not in this file; write that as a constant")

    # ------------------------------------------------------------------------------------------------ names and indices

    def _name(self, node: ast.Name, name: str, scope: Scope) -> Value:
        value = scope.find(name)
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
            return Joined(True, (), "noop") if name == "noop_mask" else Library(f"{owner.path}.{name}")
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
            assigned = list(self.assigned.get(found.path, {}).values())
            made_by, value = assigned[0] if len(assigned) == 1 else (None, None)
            if value is not None:
                return value
            return replace(found, made_by=made_by) if isinstance(made_by, ast.Call) else found
        raise TranslationError(node, f"'.{name}' has no counterpart in the expression language")

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

    # ------------------------------------------------------------------------------------------------------------ calls

    def _call(
        self, node: ast.Call, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> Value:
        if isinstance(function, ast.Attribute):
            owner = self.read(function.value, scope)
            called = self._attribute(function, owner, function.attr, is_called=True)
        else:
            called = self.read(function, scope)
        return self.call_value(node, called, args, keywords, scope)

    def call_value(
        self, node: ast.Call, called: Value, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> Value:
        """The result of a call of a value."""
        values, options = self._arguments(node, called, args, keywords, scope)
        if isinstance(called, Unread):
            raise TranslationError(called.node, called.reason)
        if isinstance(called, Closure):
            return self.call(called, values, options, node)
        if isinstance(called, Joined):
            return self.call_joined(called, values, node)
        if isinstance(called, Method):
            return self._method(called, values, options, node)
        if isinstance(called, Library):
            return self.library(called, values, options, node)
        if isinstance(called, Captured) and not called.indices:
            raise TranslationError(node, f"'{called.name}' is no function of this file, so its result is not known")
        raise TranslationError(node, "what is called here is no function of this file")

    def _arguments(
        self, node: ast.Call, called: Value, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> tuple[list[Value], dict[str, Value]]:
        """The arguments of a call. Functions that keep what they are given, and outside of a mod the file's, may get
        arguments that cannot be translated; these become captured values, with the names of the parameters."""
        flexible = isinstance(called, Library) and (self.is_kept(called) or called.last == "partial")
        parameters: list[str] = []
        if isinstance(called, Closure) and not self.strict:
            flexible, parameters = True, [parameter.arg for parameter in called.parameters]

        def read(argument: ast.expr, parameter: str) -> Value:
            try:
                return self.read(argument, scope)
            except TranslationError:
                if not flexible:
                    raise
                return Captured(parameter, made_by=argument)

        if any(keyword.arg is None for keyword in keywords):
            raise TranslationError(node, NO_STARS)
        values: list[Value] = []
        for arg in args:
            if isinstance(arg, ast.Starred):
                values += self.starred(node, arg, scope)
            else:
                place = len(values)
                values.append(read(arg, parameters[place] if place < len(parameters) else "argument"))
        return values, {keyword.arg: read(keyword.value, keyword.arg) for keyword in keywords if keyword.arg}

    def starred(self, node: ast.Call, argument: ast.Starred, scope: Scope) -> tuple[Value, ...]:
        """The arguments that `*argument` stands for in a call."""
        try:
            value = self.read(argument.value, scope)
        except UndecidedError:
            raise
        except TranslationError:
            value = None
        if not isinstance(value, Several):
            raise TranslationError(node, NO_STARS)
        return value.items

    def is_kept(self, function: Library) -> bool:
        """True for a function that returns the function it is given."""
        module, dot, _ = function.path.partition(".")
        return function.last in KEPT_FUNCTION and (not dot or module in KEEPERS)

    def library(self, called: Library, args: list[Value], options: Mapping[str, Value], node: ast.Call) -> Value:
        """The result of a function of another module."""
        name = called.last
        if self.is_kept(called):
            if name == "wraps":  # wraps(f) is partial(update_wrapper, wrapped=f)
                return Library("functools.update_wrapper")
            return args[0] if args and not isinstance(args[0], Constant) else called
        if name == "partial" and args:
            function = args[0]
            if isinstance(function, Closure):
                return replace(function, bound={**function.bound, **options}, first=(*function.first, *args[1:]))
            if isinstance(function, Library) and self.is_kept(function):
                return function
            raise TranslationError(node, "what partial gets is no function of this file")
        if name == "finfo":
            raise TranslationError(node, "the lowest float is no mask: write float('-inf'), which leaves the pair out")
        if (name in KNOWN and "." in called.path) or name in (
            "abs",
            "min",
            "max",
            "int",
            "float",
            "bool",
            "round",
            "pow",
        ):
            return self.apply(name, args, options, node)
        reason = f"'{called.path}' has no counterpart in the expression language"
        raise TranslationError(node, reason if "." in called.path else f"'{name}' is not defined in this file")

    def _method(self, called: Method, args: list[Value], options: Mapping[str, Value], node: ast.Call) -> Value:
        if called.name in REDUCTIONS and called.name not in ("max", "min"):
            raise TranslationError(node, f"'.{called.name}' looks at more than one pair; a mod sees one pair at a time")
        if called.name not in KNOWN:
            raise TranslationError(node, NO_SIZES)
        return self.apply(called.name, [called.owner, *args], options, node)

    def call_joined(self, mask: Joined, args: list[Value], node: ast.AST) -> Value:
        """`and_masks(f, g)(b, h, q_idx, kv_idx)`."""
        values = [self.call_mod(part, args, node) for part in mask.parts]
        # Captured names that are parts of a mask are booleans.
        return self.all_of(mask.is_and, [self.boolean(value, node) for value in values], node)

    def call_mod(self, mod: Mod, args: list[Value], node: ast.AST) -> Value:
        """The result of a mod."""
        if isinstance(mod, Unread):
            raise TranslationError(mod.node, mod.reason)
        return self.call_joined(mod, args, node) if isinstance(mod, Joined) else self.call(mod, args, {}, node)

    def call(self, called: Closure, args: list[Value], options: Mapping[str, Value], node: ast.AST) -> Value:
        """The result of a function of the file."""
        if self.depth >= MOST_CALLS:
            raise TranslationError(node, "calls are nested too deeply: the function seems to call itself without end")
        self.depth += 1
        try:
            return self.run(called.node, self.bind(called, args, options, node))
        finally:
            self.depth -= 1

    def run(self, function: Function, scope: Scope) -> Value:
        """The value that the body of a function returns."""
        raise NotImplementedError

    def bind(self, called: Closure, args: list[Value], options: Mapping[str, Value], node: ast.AST) -> Scope:
        """The scope of a call: each parameter with its argument or default."""
        arguments = called.node.args
        if arguments.vararg or arguments.kwarg:
            raise TranslationError(node, "the function takes * or ** arguments, which have no counterpart here")
        positional = [*arguments.posonlyargs, *arguments.args]
        given = [*called.first, *args]
        if len(given) > len(positional):
            raise TranslationError(node, f"the function takes {len(positional)} arguments, got {len(given)}")
        names = dict(zip((p.arg for p in positional), given, strict=False))
        scope = Scope(called.scope, names, self.rebound_in(called.node))
        scope.names |= {**called.bound, **options}
        defaults = dict(zip([p.arg for p in positional[::-1]], arguments.defaults[::-1], strict=False))
        defaults |= {
            p.arg: d for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None
        }
        for parameter in [*positional, *arguments.kwonlyargs]:
            if parameter.arg not in scope.names:
                if parameter.arg not in defaults:
                    raise TranslationError(node, f"the argument '{parameter.arg}' of the function is missing")
                value = self.read(defaults[parameter.arg], called.scope)
                is_none = isinstance(value, Constant) and value.value is None
                scope.names[parameter.arg] = Constant(None, not_given=parameter.arg) if is_none else value
        return scope

    def rebound_in(self, function: Function) -> frozenset[str]:
        """The names of a function's scope that other functions assign."""
        if function not in self.rebound:
            self.rebound[function] = rebound_in(function)
        return self.rebound[function]

    def expression(self, mod: Mod, node: ast.AST) -> Symbol:
        """A mod as an expression of the language."""
        if is_score(mod):
            value = self.call_mod(mod, [SCORE_ARGUMENT, *INDEX_ARGUMENTS], node)
            return self.guess(self.number(value, node), Kind.FLOAT)
        return self.boolean(self.call_mod(mod, list(INDEX_ARGUMENTS), node), node)


def default_number(node: ast.expr | None) -> int | float | None:
    """The number of a default that is a literal number, else None."""
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool) and isinstance(node.value, int | float):
        return None if literal(node.value) is None else node.value
    return None
