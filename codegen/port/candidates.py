"""Finds the mods of a FlexAttention file: named functions, what factories make, and mods without a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from codegen.port.calls import KEPT_FUNCTION
from codegen.port.flex import JOINS, FlexReader, Made
from codegen.port.reader import default_number
from codegen.port.same import fingerprint, parts_inside
from codegen.port.values import (
    Captured,
    Closure,
    Constant,
    Found,
    Joined,
    Kind,
    Library,
    Mod,
    Scope,
    TranslationError,
    Unread,
    Value,
    is_mod,
    is_score,
    named,
    parts_of_call,
)

_ANY_MOD = re.compile(r"_*(mask|score)?_?(mod|fn|mask|score|inner|func|lambda_\d+|(and|or)_\d+)")
"""Names that say nothing about what a mod does."""
_JOINED = re.compile(r"(and|or)_\d+")
"""Names of joined masks that the file gives no name."""

NO_DECORATOR = "this file does not define the decorator; if it changes no value, leave it out"
NO_MOD = "what the decorator returns is no mask_mod or score_mod; if it changes no value, leave it out"
NO_FACTORY = "what the decorators return is not known; if they change no value, leave them out"
NO_GRADIENT = "a score cannot be left out of its derivative"


class Candidates(FlexReader):
    """`found` are the mods of a file, `instantiated` the factories that the file itself calls."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.found: list[Found] = []
        self.instantiated: set[str] = set()
        self.in_class = ""
        """The class whose body is read: its `__call__` makes its objects mods."""
        self.unexplored: list[tuple[Closure, Value]] = []
        """Functions that are no mods and were not read yet, and what their decorators make of them."""
        self._parts: dict[str, list[Mod]] = {}
        """Fingerprint of an unread mod -> the mods of the factory that makes it."""

    def node_of(self, mod: Mod) -> ast.AST:
        """The syntax node that an error about a whole mod points at."""
        if isinstance(mod, Closure | Unread):
            return mod.node
        return self.node_of(mod.parts[0]) if mod.parts else ast.Name("noop_mask", lineno=0)

    def name_of(self, mod: Mod) -> str | None:
        """The name under which a mod was found."""
        wanted = fingerprint(mod)
        return next((found.name for found in self.found if fingerprint(found.mod) == wanted), None)

    def register(self, name: str, mod: Mod, line: int, *, made_by: str = "") -> None:
        """Note a mod that has a name."""
        if self.registers:
            self.found.append(Found(name, mod, line, made_by=made_by))

    @contextmanager
    def unregistered(self) -> Iterator[None]:
        """Inside, no mod gets a name: a function is called, whose mods have their names already."""
        before, self.registers = self.registers, False
        try:
            yield
        finally:
            self.registers = before

    def call(self, called: Closure, args: list[Value], options: Mapping[str, Value], node: ast.AST) -> Value:
        """The result of a function of the file; a function that returns a mod is a factory."""
        with self.unregistered():
            value = super().call(called, args, options, node)
        if is_mod(value) and not is_mod(called):
            self.instantiated.add(called.label)
            return named(value, called.label)
        return value

    # ------------------------------------------------------------------------------------------------------- functions

    def define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        """Give the name of a function its value."""
        closure = self.closure(node, scope, node.name)
        parameters = closure.parameters
        if parameters and parameters[0].arg in ("self", "cls"):
            # A method may be a mod, which the call of its object completes.
            method = replace(closure, first=(Captured(parameters[0].arg),))
            closure = method if is_mod(method) else closure
        value = self._decorated(closure, node.decorator_list, scope)
        scope.names[node.name] = value
        if is_mod(value):
            is_call = node.name == "__call__" and self.in_class
            self.register(self.in_class if is_call else node.name, value, node.lineno)
        if not is_mod(closure) and self.registers:
            self.unexplored.append((closure, value))

    def _decorated(self, closure: Closure, decorators: list[ast.expr], scope: Scope) -> Value:
        """What the decorators of a function make of it."""
        value: Value = closure
        for decorator in reversed(decorators):
            try:
                value = named(self._decorate(decorator, value, scope), closure.label)
            except TranslationError as error:
                return Unread(error.node or decorator, error.reason, closure.label, parts_of_call(closure))
            if is_mod(closure) and not is_mod(value):
                return Unread(decorator, NO_MOD, closure.label, parts_of_call(closure))
        return value

    def _decorate(self, decorator: ast.expr, value: Value, scope: Scope) -> Value:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        # A snippet may use functools without an import.
        is_bare = isinstance(function, ast.Name) and scope.find(function.id) is None
        if isinstance(function, ast.Name) and is_bare and function.id in KEPT_FUNCTION:
            return value
        called: Value | None = None
        with suppress(TranslationError):
            called = self.read(function, scope)
        if function is not decorator and isinstance(called, Closure | Library):
            is_own = isinstance(called, Closure)
            try:
                called = self.read(decorator, scope)
            except TranslationError:
                if is_own:
                    raise
                called = None
        if isinstance(called, Closure):
            return self.call(called, [value], {}, decorator)
        if not (isinstance(called, Library) and self.is_kept(called)):
            raise TranslationError(decorator, NO_DECORATOR)
        if called.last in ("no_grad", "inference_mode") and isinstance(value, Closure) and parts_of_call(value) == 5:
            raise TranslationError(decorator, NO_GRADIENT)
        return value

    def open_scope(self, closure: Closure) -> Scope:
        """The scope of a function that is read without a call: its parameters are captured values."""
        arguments = closure.node.args
        scope = Scope(closure.scope, rebound=self.rebound_in(closure.node))
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: dict[str, ast.expr | None] = dict(
            zip([p.arg for p in positional[::-1]], arguments.defaults[::-1], strict=False)
        )
        defaults |= {p.arg: d for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
        extra = [p for p in (arguments.vararg, arguments.kwarg) if p is not None]
        for parameter in [*positional, *arguments.kwonlyargs, *extra]:
            name, default = parameter.arg, defaults.get(parameter.arg)
            annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation).split(".")[-1]
            number = default_number(default)
            if number is not None and not annotation:
                annotation = type(number).__name__
            if isinstance(default, ast.Constant) and number is None:
                scope.names[name] = Constant(default.value, default_of=name)
            else:
                scope.names[name] = Captured(name, annotation=annotation.strip("'\""), example=number)
        return scope

    # ------------------------------------------------------------------------------------------------------ all of them

    def explore_all(self) -> None:
        """Read every function that is no mod, with captured values as arguments, to find the mods that it makes."""
        seed, explored = dict(self.guesses), dict(self.guesses)
        while self.unexplored:
            explored |= {name: kind for name, kind in self.guesses.items() if name not in explored}
            self.guesses = dict(seed)  # a name of one function says nothing about the same name of another
            closure, decorated = self.unexplored.pop(0)
            before, made_before = len(self.found), len(self.made)
            if closure.label in JOINS and closure.node.args.vararg is not None:
                continue  # the file's own `and_masks`: what it joins is known at its calls
            value: Value = Constant(None)
            with suppress(TranslationError):
                value = self.run(closure.node, self.open_scope(closure))
            if is_mod(value):
                # Other mods are what it is made of, and ported alone only if it cannot be ported.
                same = fingerprint(value)
                if isinstance(value, Unread):
                    self.found[before:] = [one for one in self.found[before:] if fingerprint(one.mod) != same]
                    inside = self._parts.setdefault(same, [])
                    inside += [one.mod for one in self.found[before:]]
                    inside += [one.mod for one in self.made[made_before:]]
                else:
                    del self.found[before:], self.made[made_before:]
                name = _factory_name(closure, value)
                mod = _made_by(closure, decorated, value)
                self.register(name, replace(mod, label=name), closure.node.lineno, made_by=closure.label)
            for place, found in enumerate(self.found[before:], start=before):
                if _ANY_MOD.fullmatch(found.name) and found.name != closure.label:
                    self.found[place] = replace(found, name=f"{closure.label}_{found.name}")
        self.guesses = {**self.guesses, **explored}
        self._name_others()
        self._tell_apart()

    def _name_others(self) -> None:
        """Name the mods that the file gives no name, unless they are only parts of others."""
        chosen = self._chosen()
        called = {fingerprint(made.mod) for made in chosen}
        for place, found in enumerate(self.found):
            if found.made_by and fingerprint(found.mod) in called:  # what a call gives is what the factory gives
                self.found[place] = replace(found, made_by="")
        known = {fingerprint(found.mod) for found in self.found}
        used = {fingerprint(mod) for mod in self.used}
        mods = [*(found.mod for found in self.found), *(made.mod for made in chosen)]
        inside = {fingerprint(part) for mod in mods for part in parts_inside(mod)}
        named_before = {found.name for found in self.found}
        others: list[Found] = []
        for made in chosen:
            wanted = fingerprint(made.mod)
            if wanted in known or (wanted in inside and wanted not in used):
                continue
            known.add(wanted)
            others.append(Found(_title(made.mod), made.mod, made.node.lineno))
        names = [found.name for found in others]
        for found in others:
            is_taken = found.name in named_before or names.count(found.name) > 1
            has_line = found.name.endswith(f"_{found.line}")
            name = f"{found.name}_{found.line}" if is_taken and not has_line else found.name
            self.found.append(replace(found, name=name, title=found.name))

    def _chosen(self) -> list[Made]:
        """The mods that expressions make. Where one is read several times, first with captured arguments of the
        function around it and then in calls of that function, the first is kept if it can be translated; else the
        calls' are, which takes the place of what was found."""
        groups: dict[ast.expr, list[Made]] = {}
        for made in self.made:
            groups.setdefault(made.node, []).append(made)
        chosen: list[Made] = []
        resolved: set[str] = set()
        for group in groups.values():
            known = [made for made in group if not isinstance(made.mod, Unread)]
            chosen += [made for made in known if not made.in_call] or known or group[:1]
            if known:
                resolved |= {fingerprint(made.mod) for made in group if isinstance(made.mod, Unread)}
        parts = [id(mod) for unread in resolved for mod in self._parts.get(unread, ())]
        self.found = [one for one in self.found if fingerprint(one.mod) not in resolved and id(one.mod) not in parts]
        return sorted((one for one in chosen if id(one.mod) not in parts), key=lambda made: made.in_call)

    def _tell_apart(self) -> None:
        """Give mods with the same name, for instance in both branches of an `if`, different names."""
        lines: dict[str, list[int]] = {}
        for found in self.found:
            lines.setdefault(found.name, []).append(found.line)
        names: dict[str, str] = {}
        for place, found in enumerate(self.found):
            plain = found.name if len(set(lines[found.name])) == 1 else f"{found.name}_{found.line}"
            name, number, mod = plain, 1, fingerprint(found.mod)
            while names.setdefault(name, mod) != mod:  # two lambdas in one line
                number += 1
                name = f"{plain}_{number}"
            self.found[place] = replace(found, name=name)


def _made_by(factory: Closure, decorated: Value, made: Mod) -> Mod:
    """What a call of a decorated factory gives, which without its decorators makes `made`."""
    if isinstance(decorated, Closure) and decorated.node is factory.node:
        return made
    parts = 5 if is_score(made) else 4
    if isinstance(decorated, Unread):
        return replace(decorated, parts=parts)
    return Unread(factory.node, NO_FACTORY, factory.label, parts)


def _title(mod: Mod) -> str:
    """A name for a mod without one: its function's, or the names of the masks that it joins."""
    if isinstance(mod, Joined) and _JOINED.fullmatch(mod.label):
        return "_".join(part.label for part in mod.parts) or "noop"
    return mod.label


def _factory_name(factory: Closure, made: Mod) -> str:
    """The name of the mod that a function makes. A method's name often says what it does, not what it makes, so that
    the mod's own name is taken then, unless that says nothing."""
    parameters = factory.node.args.args
    is_method = bool(parameters) and parameters[0].arg in ("self", "cls")
    return made.label if is_method and not _ANY_MOD.fullmatch(made.label) else factory.label
