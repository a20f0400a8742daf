"""Reads calls: of the file's functions, of torch's, and of functions that return what they are given."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from codegen.port.functions import KNOWN, REDUCTIONS, Functions
from codegen.port.made_of import folded
from codegen.port.same import fingerprint
from codegen.port.sequences import SEQUENCES, UNKNOWN_LIST, sequence
from codegen.port.syntax import rebound_in
from codegen.port.values import (
    Captured,
    Closure,
    Constant,
    ForeignError,
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
    UndecidedError,
    Unread,
    Value,
    is_score,
)

INDEX_ARGUMENTS = tuple(Symbol(ast.Name(name), Kind.INT) for name in ("b", "h", "q_idx", "kv_idx"))
SCORE_ARGUMENT = Symbol(ast.Name("score"), Kind.FLOAT)

DECORATORS = ("staticmethod", "classmethod", "property")
BUILTINS = (
    *("abs", "min", "max", "int", "float", "bool", "round", "pow", "print", "isinstance", "sum"),
    *DECORATORS,
    *SEQUENCES,
)
NUMBERS = ("abs", "min", "max", "int", "float", "bool", "round", "pow")
"""Python's functions of numbers."""
WHOLE = ("math.floor", "math.ceil", "math.trunc", "round")
"""Functions of Python whose result is an integer, beside torch's of the same names."""
_SAME_IN_TORCH = ("add", "sub", "mul", "pow", "eq", "ne", "lt", "le", "gt", "ge", "abs", "neg")
OPERATORS = dict.fromkeys(_SAME_IN_TORCH, "") | {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "not": "logical_not",
}
"""Functions of the module `operator`, without underscores at the end -> torch's, "" for the same name."""
KEPT_FUNCTION = (
    *("compile", "lru_cache", "cache", "cached_property", "wraps", "update_wrapper", "vmap", *DECORATORS),
    *("no_grad", "inference_mode", "script", "disable", "allow_in_graph", "abstractmethod", "override", "final"),
)
"""Functions that return the function they are given, without a change that matters to a mod."""
KEEPERS = ("torch", "functools", "abc", "typing", "typing_extensions")
"""Modules that these functions come from, if they are not built in."""

NO_STARS = "arguments are written one by one, not with **"
UNKNOWN_STARS = (
    "what * stands for is not known; write the arguments one by one, or loop over a list that the file writes out"
)
NO_SIZES = "the size of a tensor is not known; the call's lengths are q_len and kv_len in an entry"

MOST_CALLS = 40
"""Deepest nesting of calls. An endless recursion is an error; FlexAttention could not trace it either."""


class CallReader(Functions):
    """Values of calls."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.depth = 0
        self.strict = False
        self.context = ""
        """What tells the values apart that the same code gives: see `Captured`."""
        self.given: dict[str, None] = {}
        """The captured values that a mod compares with None, and that are taken to be given."""
        self.rebound: dict[Function, frozenset[str]] = {}
        """Function -> the names of its scope that other functions assign."""

    def unknown(self, name: str, made_by: ast.expr | None = None, annotation: str = "") -> Captured:
        """A value that is known only when the program runs, of the call and the round of a loop that are read."""
        return Captured(name, annotation=annotation, made_by=made_by, context=self.context)

    def is_given(self, value: Value) -> bool:
        """True inside of a mod for an argument of its factory, which a note of the entry names."""
        if isinstance(value, Captured) and self.strict:
            self.given[value.path] = None
        return self.strict and isinstance(value, Captured)

    def read(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression; raises `TranslationError`."""
        raise NotImplementedError

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
                return self.unknown(parameter, argument)

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
            raise TranslationError(node, UNKNOWN_STARS)
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
            if isinstance(function, Library) and function.not_read:
                raise ForeignError(node, function.not_read)
            raise TranslationError(node, "what partial gets is no function of this file")
        if name == "finfo":
            raise TranslationError(node, "the lowest float is no mask: write float('-inf'), which leaves the pair out")
        if called.path in SEQUENCES and not options:
            made = sequence(name, args)
            if made is None:
                raise TranslationError(node, NO_SIZES if name == "len" else UNKNOWN_LIST)
            return made
        if called.path == "functools.reduce" and not options:
            return self._reduced(args, node)
        constants = [arg.value for arg in args if isinstance(arg, Constant)]
        if called.path.partition(".")[0] == "math" and len(constants) == len(args) and not options:
            number = folded(name, constants)
            if number is not None:
                return number
        word = name.strip("_")
        if called.path.partition(".")[0] == "operator" and word in OPERATORS:
            return self.apply(OPERATORS[word] or word, args, options, node)
        if called.path == "sum" and len(args) == 1 and isinstance(args[0], Several) and args[0].items:
            return self._folded_items(lambda a, b: self.binary(ast.Add(), a, b, node), args[0].items)
        if (name in KNOWN and "." in called.path) or name in NUMBERS:
            value = self.apply(name, args, options, node)
            # Python's own functions round to an integer, torch's to a float.
            is_whole = called.path in WHOLE and len(args) == 1 and isinstance(value, Symbol)
            return self.cast(value, "int32", node) if is_whole else value
        if called.not_read:
            raise ForeignError(node, called.not_read)
        reason = f"'{called.path}' has no counterpart in the expression language"
        raise TranslationError(node, reason if "." in called.path else f"'{name}' is not defined in this file")

    def _reduced(self, args: list[Value], node: ast.Call) -> Value:
        """`functools.reduce(function, items, first)`."""
        function, items = (*args, None, None)[:2]
        if (
            not isinstance(items, Several)
            or not (items.items or args[2:])
            or not isinstance(function, Closure | Library)
        ):
            raise TranslationError(node, "reduce of a function and a list that this file does not write out")

        def joined(a: Value, b: Value) -> Value:
            if isinstance(function, Closure):
                return self.call(function, [a, b], {}, node)
            return self.library(function, [a, b], {}, node)

        return self._folded_items(joined, (*args[2:], *items.items))

    def _folded_items(self, joined: Callable[[Value, Value], Value], items: Sequence[Value]) -> Value:
        result = items[0]
        for item in items[1:]:
            result = joined(result, item)
        return result

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
        scope, context = self.bind(called, args, options, node), self.context
        if not self.strict:
            self.context = ", ".join(map(fingerprint, scope.names.values()))
        self.depth += 1
        try:
            return self.run(called.node, scope)
        finally:
            self.depth -= 1
            self.context = context

    def run(self, function: Function, scope: Scope) -> Value:
        """The value that the body of a function returns."""
        raise NotImplementedError

    def bind(self, called: Closure, args: list[Value], options: Mapping[str, Value], node: ast.AST) -> Scope:
        """The scope of a call: each parameter with its argument or default."""
        arguments = called.node.args
        if arguments.kwarg:
            raise TranslationError(node, "the function takes ** arguments, which have no counterpart here")
        positional = [*arguments.posonlyargs, *arguments.args]
        given = [*called.first, *args]
        if len(given) > len(positional) and arguments.vararg is None:
            raise TranslationError(node, f"the function takes {len(positional)} arguments, got {len(given)}")
        names = dict(zip((p.arg for p in positional), given, strict=False))
        scope = Scope(called.scope, names, self.rebound_in(called.node))
        if arguments.vararg is not None:
            scope.names[arguments.vararg.arg] = Several(tuple(given[len(positional) :]))
        scope.names |= {**called.bound, **options}
        defaults = _defaults(called.node)
        for parameter in [*positional, *arguments.kwonlyargs]:
            if parameter.arg not in scope.names:
                if parameter.arg not in defaults:
                    raise TranslationError(node, f"the argument '{parameter.arg}' of the function is missing")
                known = called.defaults.get(parameter.arg)
                value = self.read(defaults[parameter.arg], called.scope) if known is None else known
                is_none = isinstance(value, Constant) and value.value is None
                scope.names[parameter.arg] = Constant(None, not_given=parameter.arg) if is_none else value
        return scope

    def closure(self, node: Function, scope: Scope, label: str) -> Closure:
        """A function, with the values that its defaults have where it is defined."""
        values: dict[str, Value] = {}
        for name, default in _defaults(node).items():
            with suppress(TranslationError):
                values[name] = self.read(default, scope)
        return Closure(node, scope, label, defaults=values)

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


def _defaults(function: Function) -> dict[str, ast.expr]:
    """Parameter -> the expression of its default, for those that have one."""
    arguments = function.args
    positional = [p.arg for p in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(positional[::-1], arguments.defaults[::-1], strict=False))
    return defaults | {
        p.arg: d for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None
    }
