"""Reads calls of FlexAttention's own functions, and notes the mods that expressions make without a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from codegen.port.reader import ExpressionReader
from codegen.port.values import (
    BlockMask,
    Captured,
    Closure,
    Constant,
    ForeignError,
    Joined,
    Kind,
    Library,
    Mod,
    Scope,
    TranslationError,
    UndecidedError,
    Unread,
    Value,
    is_mod,
)

JOINS = ("and_masks", "or_masks")
MOD_ARGUMENTS = {"create_block_mask": ("mask_mod", 0, 4), "flex_attention": ("score_mod", 3, 5)}
"""Function -> the name and the place of its mod, and how many arguments that mod has."""

NOT_HERE = "this file does not define it; port the file that does"


@dataclass(frozen=True)
class Pair:
    """A mask and a score that one call of `flex_attention` uses."""

    mask: Value
    score: Value
    line: int


@dataclass(frozen=True)
class Made:
    """A mod that an expression makes. `in_call`: the function around the expression was called by the file, so that its
    arguments are known; else they are captured."""

    mod: Mod
    node: ast.expr
    in_call: bool


class FlexReader(ExpressionReader):
    """Expressions with calls of FlexAttention."""

    def __init__(self, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.pairs: list[Pair] = []
        self.made: list[Made] = []
        self.used: list[Mod] = []
        """Mods that a call of FlexAttention uses."""
        self.registers = True
        """False while a function of the file is called, and while a mod is translated."""

    def note(self, value: Value, node: ast.expr) -> Value:
        """The value of a call or a lambda; a mod is kept for its name."""
        if is_mod(value) and not self.strict:
            self.made.append(Made(value, node, in_call=not self.registers))
        return value

    @contextmanager
    def searching(self, statement: ast.stmt, scope: Scope) -> Iterator[None]:
        """Inside, a statement is read. Afterwards what was left out of it is read, because the rest could not be read:
        a dict of masks, or an argument of a function that another module defines."""
        before, self.visited = self.visited, set()
        try:
            yield
        finally:
            if not self.strict:
                self._search(statement, scope)
            self.visited = before

    def _search(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Lambda | ast.Call) and node not in self.visited:
            with suppress(TranslationError):
                self.read(node, scope)
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            targets = [name for loop in node.generators for name in ast.walk(loop.target)]
            scope = Scope(scope, {name.id: Captured(name.id) for name in targets if isinstance(name, ast.Name)})
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                self._search(child, scope)

    # ---------------------------------------------------------------------------------------------- calls and arguments

    def call_value(
        self, node: ast.Call, called: Value, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> Value:
        """The result of a call. Masks that cannot be joined, by FlexAttention or by a function of the file with such a
        name, are a mask that cannot be translated."""
        name = called.last if isinstance(called, Library) else called.label if isinstance(called, Closure) else ""
        if isinstance(called, Library) and name in MOD_ARGUMENTS:
            return self._flex_call(node, name, args, keywords, scope)
        try:
            return super().call_value(node, called, args, keywords, scope)
        except TranslationError as error:
            if name not in JOINS or self.strict or error.node is None:
                raise
            return Unread(error.node, error.reason, f"{name[:-6]}_{node.lineno}")

    def library(self, called: Library, args: list[Value], options: Mapping[str, Value], node: ast.Call) -> Value:
        """The result of a function of another module."""
        name = called.last
        if name not in JOINS:
            return super().library(called, args, options, node)
        parts = tuple(arg for arg in args if is_mod(arg))
        if len(parts) != len(args):
            for arg in args:
                if isinstance(arg, Library) and arg.not_read:
                    raise ForeignError(node, arg.not_read)
            raise TranslationError(node, f"every argument of {name} must be a mask_mod")
        return Joined(name == "and_masks", parts, f"{name[:-6]}_{node.lineno}")

    def _flex_call(
        self, node: ast.Call, name: str, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> Value:
        """A call of `create_block_mask` or `flex_attention`, of which only the mods matter."""
        word, place, parts = MOD_ARGUMENTS[name]
        given: list[ast.expr] = []
        for arg in args:
            if isinstance(arg, ast.Starred):  # what follows stands in unknown places
                break
            given.append(arg)
        options = {keyword.arg: keyword.value for keyword in keywords}

        def argument(word: str, place: int) -> ast.expr | None:
            return options.get(word, given[place] if place < len(given) else None)

        found = argument(word, place)
        mod = Constant(None) if found is None else self._mod_argument(found, scope, parts)
        if is_mod(mod):
            self.used.append(mod)
        if name == "create_block_mask":
            return BlockMask(mod)
        blocks = argument("block_mask", 4)
        mask: Value = Constant(None)
        if blocks is not None:
            with suppress(TranslationError):
                mask = self.read(blocks, scope)
        self.pairs.append(Pair(mask.mask if isinstance(mask, BlockMask) else mask, mod, node.lineno))
        return Captured("out")

    def _mod_argument(self, node: ast.expr, scope: Scope, parts: int) -> Value:
        """The mod that a call of FlexAttention gets; `Unread` if it is made elsewhere, or in ways that are not known.

        What the caller of a function gives, and what one of several branches gives, is left out: the mods among which
        is chosen are the file's own, or another file's.
        """
        value: Value = Captured("argument", made_by=node)
        reason, is_foreign = NOT_HERE, True
        try:
            value = self.read(node, scope)
        except UndecidedError:
            return value
        except TranslationError as error:
            is_own = isinstance(node, ast.Call) and error.node is node and _word(node.func) != "partial"
            if isinstance(error, ForeignError) or not is_own:
                reason, is_foreign = error.reason, isinstance(error, ForeignError)
        if is_mod(value):
            return self.note(value, node)  # of another module, it has no name here yet
        origin = node
        if isinstance(value, Library):
            reason = value.not_read or reason
        if isinstance(value, Closure):
            required = len(value.parameters) - len(value.node.args.defaults)
            if required <= parts <= len(value.parameters):
                return self.note(replace(value, parts=parts), node)
            is_foreign = False
            reason = f"a function of {parts} arguments was expected here, got one of {len(value.parameters)}"
        elif isinstance(value, Captured) and value.made_by is not None and value.made_by is not node:
            origin = value.made_by
            if not _is_foreign(origin, scope, is_here=False):
                return value
        elif not _is_foreign(node, scope):
            return value
        label = _word(origin) or f"mod_{node.lineno}"
        return self.note(Unread(origin, reason, label, parts, is_foreign=is_foreign), node)


def _is_foreign(node: ast.expr, scope: Scope, *, is_here: bool = True) -> bool:
    """True for a name that another module defines, and for a call of it. `is_here`: the code stands in `scope`, where a
    name without a value is another module's, too."""
    if isinstance(node, ast.Call):
        return _is_foreign(node.func, scope, is_here=is_here)
    while isinstance(node, ast.Attribute):
        node, is_here = node.value, False
    if not isinstance(node, ast.Name):
        return False
    value = scope.find(node.id)
    return isinstance(value, Library) or (is_here and value is None)


def _word(node: ast.expr) -> str:
    """The name of a function that is not known; of `partial(f, ...)` that of `f`."""
    if isinstance(node, ast.Call):
        word = _word(node.func)
        return _word(node.args[0]) if word in ("partial", "compile") and node.args else word
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
