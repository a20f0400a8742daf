"""Reads statements of a FlexAttention file: leniently in modules, classes and factories, strictly in mods.

Outside of a mod, a name assigned by a statement that cannot be translated becomes a captured name, whose value the
caller of the op gives. Inside a mod such a statement is a problem.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.port.functions import is_filled
from codegen.port.loops import LOOP, Loop, LoopReader, Round
from codegen.port.modules import Project
from codegen.port.reader import FLAG_BRANCH
from codegen.port.syntax import rebound_in
from codegen.port.values import (
    BlockMask,
    Captured,
    Constant,
    Failed,
    Function,
    Kind,
    Scope,
    Several,
    Symbol,
    TranslationError,
    Undecided,
    UndecidedError,
    Value,
    is_mod,
    is_too_long,
    named,
)

EFFECT = "a mod that changes a tensor or an object has an effect beside its result"
MOST_STEPS = 20_000
"""Most statements of functions that are run for their calls: in a large library, calls of calls would never come to an
end."""

_REFUSED: dict[type[ast.stmt], str] = {
    ast.For: LOOP,
    ast.While: LOOP,
    ast.With: "a 'with' block has no counterpart in the expression language",
    ast.Try: "exceptions have no counterpart in the expression language",
    ast.Raise: "exceptions have no counterpart in the expression language",
    ast.Delete: "names are bound once in the expression language",
    ast.Global: "a mod that changes a global name has an effect beside its result",
    ast.Nonlocal: "a mod that changes an outer name has an effect beside its result",
    ast.ClassDef: "a class inside a mod",
    ast.Match: "'match' chooses by data; use torch.where",
}


@dataclass(frozen=True)
class Issue:
    """A piece of code that could not be translated."""

    line: int
    code: str
    reason: str
    file: Path


class FileReader(LoopReader):
    """Interprets a file abstractly."""

    def __init__(self, project: Project, guesses: dict[str, Kind]) -> None:
        super().__init__(project, guesses)
        self.issues: list[Issue] = []
        self.assertions: dict[str, None] = {}
        self.in_init = False
        self.block(project.tree.body, Scope(rebound=rebound_in(project.tree)))
        self.explore_all()

    def run(self, function: Function, scope: Scope) -> Value:
        if isinstance(function, ast.Lambda):
            return self.read(function.body, scope)
        before, self.in_init = self.in_init, function.name == "__init__"
        try:
            value = self.block(function.body, scope)
        finally:
            self.in_init = before
        return Constant(None) if value is None else value

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Inside, a mod is read: a statement that cannot be translated is a problem."""
        self.strict, self.registers, self.steps = True, False, 0
        try:
            yield
        finally:
            self.strict, self.registers = False, True

    # ------------------------------------------------------------------------------------------------------- statements

    def report(self, error: TranslationError) -> Failed:
        """Note a problem once."""
        if error.node is not None:
            line = getattr(error.node, "lineno", 0)
            code = ast.unparse(error.node).splitlines()[0]
            code = code if len(code) <= 100 else f"{code[:97]}..."
            issue = Issue(line, code, error.reason, self.project.file_of(error.node))
            if issue not in self.issues:
                self.issues.append(issue)
        return Failed()

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> Value | None:
        """The value that a list of statements returns, None if it runs to its end."""
        for place, statement in enumerate(statements, start=1):
            self.steps += self.depth > 0
            if self.depth > 0 and self.steps > MOST_STEPS:
                raise TranslationError(
                    statement, "the file takes too many steps to read; move its mods to one of their own"
                )
            with self.searching(statement, scope):
                if isinstance(statement, ast.Return):
                    return self._returned(statement, scope)
                if self.strict and isinstance(statement, ast.If):
                    return self._branch_in_mod(statement, statements[place:], scope)
                if self.strict and isinstance(statement, ast.For):
                    return self._for_in_mod(statement, statements[place:], scope)
                value: Value | None = None
                if isinstance(statement, ast.If):
                    value = self._branch(statement, scope)
                elif isinstance(statement, Loop) and not self.strict:
                    value = self.loop(statement, scope)
                else:
                    self._statement(statement, scope)
                if value is not None:
                    return value
        return None

    def _returned(self, statement: ast.Return, scope: Scope) -> Value:
        value = Constant(None) if statement.value is None else self._read_strictly(statement.value, scope)
        if self.registers and isinstance(value, Several):
            for item in value.items:
                known = [found.mod for found in self.found]
                if is_mod(item) and item not in known:
                    self.register(item.label, item, statement.lineno)
        return value

    def _read_strictly(self, node: ast.expr, scope: Scope) -> Value:
        try:
            return self.read(node, scope)
        except TranslationError as error:
            if not self.strict:
                raise
            self.report(error)
            raise TranslationError(None) from None

    def _statement(self, statement: ast.stmt, scope: Scope) -> None:
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return
            case Round():
                self.context = statement.context
                self.assign_value(statement.target, statement.value, scope)
            case ast.Import() | ast.ImportFrom():
                self.import_names(statement, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.define(statement, scope)
            case ast.Assign(targets=targets, value=value):
                fresh = Scope(scope)  # the value is read before any name changes
                for target in targets:
                    self._assign(target, value, fresh, scope, statement)
                scope.names |= fresh.names
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                if value is not None:
                    self._assign(target, value, scope, scope, statement)
                self._annotate(target, annotation, scope)
            case ast.AugAssign(target=target, op=op, value=value):
                if isinstance(target, ast.Name):
                    together = ast.BinOp(ast.Name(target.id, ast.Load()), op, value)
                    value = ast.copy_location(ast.fix_missing_locations(together), statement)
                    self.project.moved(value, statement)
                self._assign(target, value, scope, scope, statement)
            case ast.Assert() if self.strict:
                self.assertions[ast.unparse(statement)] = None
            case _ if self.strict:
                self._refuse(statement)
            case _:
                self._leniently(statement, scope)

    def _refuse(self, statement: ast.stmt) -> None:
        reason = _REFUSED.get(
            type(statement), "a statement for its effect has no counterpart in the expression language"
        )
        self.report(TranslationError(statement, reason))
        raise TranslationError(None)

    def _leniently(self, statement: ast.stmt, scope: Scope) -> None:
        """Read a statement outside of a mod: names that it assigns become captured, and mods in it are found."""
        if isinstance(statement, ast.Expr):
            with suppress(TranslationError):
                if not self.changes_list(statement.value, scope):
                    self.read(statement.value, scope)
            return
        if isinstance(statement, ast.Global | ast.Nonlocal):
            return
        if isinstance(statement, ast.ClassDef):
            outer, self.in_class = self.in_class, statement.name
            names = Scope(scope)
            self.classes.append(names)
            self.block([s for s in statement.body if not isinstance(s, ast.Expr)], names)
            self.in_class = outer
            scope.names[statement.name] = Captured(statement.name, attributes=names)
            return
        for body in (getattr(statement, part, []) for part in ("body", "orelse", "finalbody")):
            with suppress(TranslationError):
                self.block(body, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Scope, reads: Scope, statement: ast.stmt) -> None:
        """Give a name of `scope` a value, which is read in `reads`."""
        if isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, scope, reads, statement)
            return
        if not isinstance(target, ast.Name):
            if self.strict:
                self.report(TranslationError(statement, EFFECT))
            mod: Value | None = None
            with suppress(TranslationError):
                mod = self.read(value, reads)
            is_flag = self.in_init and isinstance(mod, Constant) and isinstance(mod.value, bool | str)
            kept = mod if is_flag or isinstance(mod, BlockMask) or is_mod(mod) else None
            before = self.assigned.setdefault(ast.unparse(target), {})
            earlier = before.get(ast.unparse(value), (value, kept))[1]
            # Two classes may assign an argument of the same name, with another default in each.
            is_same = not (isinstance(kept, Constant) or isinstance(earlier, Constant)) or kept == earlier
            before[ast.unparse(value)] = value, kept if is_same else None
            if isinstance(target, ast.Attribute):
                with suppress(TranslationError):
                    owner = self.read(target.value, reads)
                    if isinstance(owner, Captured) and owner.attributes is not None:
                        owner.attributes.names[target.attr] = Captured(target.attr, owner=owner.path)
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                changed = scope.find(target.value.id)
                if isinstance(changed, Several):
                    self.outdated.append(changed)
            return
        try:
            found = self.read(value, reads)
            if isinstance(found, Symbol) and is_too_long(found.node):
                raise TranslationError(value, "the value takes more operations than an expression may have")
        except TranslationError as error:
            made = self.unknown(target.id, value, _number_of(value))
            scope.names[target.id] = self.report(error) if self.strict else made
            return
        if isinstance(found, Constant) and not self.strict and is_filled(value):
            found = self.unknown(target.id, value, "Tensor")  # which the program may write to
        if isinstance(found, Captured) and not self.strict and any(node is found.made_by for node in ast.walk(value)):
            # A tensor of another shape than the file's, which the caller gives in its place.
            found = replace(found, name=target.id, owner="", made_by=value)
        if isinstance(found, Symbol) and not self.strict:
            found = replace(found, alias=self.unknown(target.id, value))
        if is_mod(found) and not self.strict:
            found = named(found, target.id)
            if is_mod(found):
                self.register(target.id, found, statement.lineno)
        scope.names[target.id] = found

    def _annotate(self, target: ast.expr, annotation: ast.expr, scope: Scope) -> None:
        """Note the annotated type of a name whose value the program computes."""
        if isinstance(target, ast.Name):
            value = scope.names.get(target.id, Captured(target.id))
            if isinstance(value, Captured) and not (value.annotation or self.strict):
                scope.names[target.id] = replace(value, annotation=ast.unparse(annotation).split(".")[-1].strip("'\""))

    def _unpack(
        self, target: ast.Tuple | ast.List, value: ast.expr, scope: Scope, reads: Scope, statement: ast.stmt
    ) -> None:
        elements = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(elements) == len(target.elts):
            for one, element in zip(target.elts, elements, strict=True):
                self._assign(one, element, scope, reads, statement)
            return
        items: Sequence[Value] = ()
        try:
            found = self.read(value, reads)
            if not isinstance(found, Several) or len(found.items) != len(target.elts):
                raise TranslationError(statement, "this takes apart what is not known to be several values")
            items = found.items
        except TranslationError as error:
            items = [self.report(error) if self.strict else self.unknown("", value)] * len(target.elts)
        for one, item in zip(target.elts, items, strict=True):
            if isinstance(one, ast.Name):
                scope.names[one.id] = replace(item, name=one.id) if item == Captured("") else item

    def _branch_in_mod(self, statement: ast.If, rest: Sequence[ast.stmt], scope: Scope) -> Value | None:
        """The value that an `if` and the statements after it return. If scalars of the call decide, both branches are
        read, each with the statements that follow."""
        try:
            found = self.condition(statement.test, scope)
            if not isinstance(found, bool):
                names, results = dict(scope.names), []
                for body in (statement.body, statement.orelse):
                    scope.names = dict(names)
                    results.append(self.block([*body, *rest], scope))
                first, second = results
                if first is None or second is None:
                    raise TranslationError(statement, FLAG_BRANCH)
                return self.either(found, first, second, statement)
        except TranslationError as error:
            self.report(error)
            raise TranslationError(None) from None
        return self.block([*(statement.body if found else statement.orelse), *rest], scope)

    def _for_in_mod(self, loop: ast.For, rest: Sequence[ast.stmt], scope: Scope) -> Value | None:
        """The value that a loop, read round by round, and the statements after it return."""
        try:
            rounds = self.rounds(loop, scope)
        except TranslationError as error:
            self.report(error)
            raise TranslationError(None) from None
        return self.block([*(statement for one in rounds for statement in one), *rest], scope)

    def _branch(self, statement: ast.If, scope: Scope) -> Value | None:
        with suppress(TranslationError):
            earlier, self.defaults_read = self.defaults_read, set()
            try:
                is_taken = self.decided(statement.test, scope)
                defaults = {name: Captured(name) for name in self.defaults_read}
            finally:
                self.defaults_read |= earlier
            taken, other = (statement.body, statement.orelse) if is_taken else (statement.orelse, statement.body)
            if defaults and self.registers:  # the mods of other values of these arguments
                with suppress(TranslationError):
                    self.block(other, Scope(scope.outer, {**scope.names, **defaults}, scope.rebound))
            return self.block(taken, scope)
        if "__name__" in ast.unparse(statement.test):
            self.block(statement.body, scope)
            return None
        before = dict(scope.names)
        results = []
        for body in (statement.body, statement.orelse):
            scope.names = dict(before)
            with suppress(TranslationError):
                self.block(body, scope)
            results.append(dict(scope.names))
        scope.names = dict(before)
        test = ast.unparse(statement.test)
        for name in {**results[0], **results[1]}:
            first, second = (result.get(name) for result in results)
            if name not in results[0] or name not in results[1]:
                scope.names[name] = results[name not in results[0]][name]
            elif first != second and all(isinstance(v, Captured | Symbol | Constant) for v in (first, second)):
                scope.names[name] = self.unknown(name)  # a value that the program gives the mod in either case
            elif first != second:
                reason = (
                    f"it depends on `if {test}` in line {statement.lineno}, which constants of this file do not decide"
                )
                scope.names[name] = Undecided(reason)
            elif first is not None:
                scope.names[name] = first
        if any(isinstance(s, ast.Return) for part in (statement.body, statement.orelse) for s in part):
            raise UndecidedError(
                statement.test, f"what is returned depends on `if {test}`, which constants do not decide"
            )
        return None


def _number_of(value: ast.expr) -> str:
    """The type of a number that Python's `int` or `float` gives, "" for any other expression."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("int", "float"):
        return value.func.id
    return ""
