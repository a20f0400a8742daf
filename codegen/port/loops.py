"""Reads loops of a FlexAttention file, and calls that change a list: round by round where the file gives the items."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from codegen.port.flex import Made
from codegen.port.imports import ImportReader
from codegen.port.modules import Project
from codegen.port.values import (
    Captured,
    Closure,
    Kind,
    Scope,
    Several,
    TranslationError,
    Value,
    is_mod,
)

LOOP = "a loop; write its steps one after the other, or as one expression"
MOST_ROUNDS = 256
"""Most rounds of a loop outside of a mod, and of all loops inside of it together, that are read one after the other."""

Loop = ast.For | ast.AsyncFor | ast.While


class Round(ast.stmt):
    """The start of a round of a loop, which gives its names their values."""

    def __init__(self, target: ast.expr, value: Value, context: str) -> None:
        super().__init__()
        self.target = target
        self.value = value
        self.context = context


class LoopReader(ImportReader):
    """Loops. In mods each has known rounds. Elsewhere a loop that fills a list of mods, or joins mods one by one, is
    read round by round if its items are known. Of any other loop one round is read, with captured values."""

    def __init__(self, project: Project, guesses: dict[str, Kind]) -> None:
        super().__init__(project, guesses)
        self.rounds_left = MOST_ROUNDS

    def rounds(self, loop: ast.For, scope: Scope) -> list[list[ast.stmt]]:
        """The statements of each round, and those after the last one."""
        items = self.items(loop.iter, scope)
        if any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(loop)):
            raise TranslationError(loop, LOOP)
        return [*([Round(loop.target, item, self.round_of(item)), *loop.body] for item in items), loop.orelse]

    def loop(self, loop: Loop, scope: Scope) -> Value | None:
        """Read a loop outside of a mod. The value that it returns, None if it runs to its end."""
        rounds: list[list[ast.stmt]] = []
        if isinstance(loop, ast.For):
            with suppress(TranslationError):
                rounds = self.rounds(loop, scope)
        names, lists = dict(scope.names), self._lists()
        lengths, instantiated = [len(one) for one in lists], set(self.instantiated)
        with suppress(TranslationError), self._nested(rounds):
            self.block(rounds[0], scope)
            if _makes_of_mods(names, scope):
                value = self.block([statement for one in rounds[1:] for statement in one], scope)
                self._unname(lengths[0], names, scope)
                return value
        scope.names, self.instantiated = names, instantiated
        for one, length in zip(lists, lengths, strict=True):
            del one[length:]
        self._one_round(loop, scope)
        return None

    @contextmanager
    def _nested(self, rounds: Sequence[object]) -> Iterator[None]:
        """Inside, the rounds of a loop are read, each of which may take its share of the rounds that are left."""
        if not 1 < len(rounds) <= self.rounds_left:
            raise TranslationError(None)
        context = self.context
        before, self.rounds_left = self.rounds_left, self.rounds_left // len(rounds)
        try:
            yield
        finally:
            self.rounds_left, self.context = before, context

    def _lists(self) -> list[list[Any]]:
        return [self.found, self.made, self.used, self.pairs, self.outdated, self.unexplored]

    def _unname(self, start: int, names: Mapping[str, Value], scope: Scope) -> None:
        """Of the mods that a loop has given a name, only those with a name from before the loop keep it, which is the
        result: others are parts of what the loop makes, and ported alone only if nothing joins them."""
        registered = self.found[start:]
        del self.found[start:]
        for found in registered:
            if found.name not in names:
                self.made.append(Made(found.mod, ast.Name(found.name, lineno=found.line), in_call=False))
            elif scope.names.get(found.name) is found.mod:
                self.found.append(found)

    def _one_round(self, loop: Loop, scope: Scope) -> None:
        """Read a loop whose rounds are not known: what it changes has not the first round's value in the others."""
        self._forget(loop, scope)
        if not isinstance(loop, ast.While):
            for name in ast.walk(loop.target):
                if isinstance(name, ast.Name):
                    scope.names[name.id] = self.unknown(name.id)
        for body in (loop.body, loop.orelse):
            with suppress(TranslationError):
                self.block(body, scope)
        self._forget(loop, scope)

    def _forget(self, loop: Loop, scope: Scope) -> None:
        """Make captured values of the names that a loop changes."""
        for changed in ast.walk(loop):
            if isinstance(changed, ast.Name) and isinstance(changed.ctx, ast.Store):
                if changed.id in scope.names and not isinstance(scope.names[changed.id], Closure):
                    scope.names[changed.id] = self.unknown(changed.id)
            elif isinstance(changed, ast.Attribute) and isinstance(owner := changed.value, ast.Name):
                is_list = isinstance(scope.names.get(owner.id), Several)  # which a method may change
                scope.names |= {owner.id: self.unknown(owner.id)} if is_list else {}

    def changes_list(self, node: ast.expr, scope: Scope) -> bool:
        """True for a call of a list's method. `append` and `extend` are followed; after any other the list is not
        known."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        owner = node.func.value
        if not isinstance(owner, ast.Name):
            return False
        old = scope.find(owner.id)
        if not isinstance(old, Several):
            return False
        new: Value = Captured(owner.id)
        if len(node.args) == 1 and not node.keywords:
            with suppress(TranslationError):
                if node.func.attr == "append":
                    new = Several((*old.items, self.read(node.args[0], scope)))
                elif node.func.attr == "extend":
                    new = Several((*old.items, *self.items(node.args[0], scope)))
        self.outdated.append(old)
        if scope.names.get(owner.id) is old:
            scope.names[owner.id] = new
        return True


def _makes_of_mods(before: Mapping[str, Value], scope: Scope) -> bool:
    """True if a list has got another mod, or a mod was made of what had its name before."""
    for name, old in before.items():
        new = scope.names.get(name)
        if isinstance(old, Several) and isinstance(new, Several):
            if any(is_mod(item) for item in new.items[len(old.items) :]):
                return True
        elif new is not old and is_mod(old) and is_mod(new):
            return True
    return False
