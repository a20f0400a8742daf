"""Reads names that a FlexAttention file imports from other modules of its project."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from codegen.port.candidates import Candidates
from codegen.port.flex import JOINS, MOD_ARGUMENTS
from codegen.port.modules import LIBRARIES, Project
from codegen.port.syntax import rebound_in
from codegen.port.values import Captured, Kind, Library, Scope, TranslationError, Value

MOST_IMPORTS = 20
"""Longest chain of modules that import a name from each other."""


class ImportReader(Candidates):
    """Values of imported names."""

    def __init__(self, project: Project, guesses: dict[str, Kind]) -> None:
        super().__init__(guesses)
        self.project = project
        self.steps = 0
        self._modules: dict[Path, Scope] = {}
        """File of a module that was read -> its names."""

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> Value | None:
        """The value that a list of statements returns, None if it runs to its end."""
        raise NotImplementedError

    def import_names(self, statement: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        """Give the names of an import statement their values. A module is read when one of its names is used."""
        importer = self.project.file_of(statement)
        module = ""
        if isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
        for name in statement.names:
            if isinstance(statement, ast.Import):
                path = name.name if name.asname else name.name.partition(".")[0]
                scope.names[name.asname or path] = _library(path, importer)
            elif name.name == "noop_mask":
                scope.names.pop(name.asname or name.name, None)
            elif name.name != "*":
                dot = "." if module.strip(".") else ""
                scope.names[name.asname or name.name] = _library(f"{module}{dot}{name.name}", importer)
            elif (file := self.project.find(importer, module)) is not None and _library(module, importer).importer:
                with suppress(TranslationError):
                    names = self._names_of(file, statement).names
                    scope.names |= {word: value for word, value in names.items() if word[:1] != "_"}

    def imported(self, library: Library, node: ast.AST) -> Value:
        """The value of a name that another module defines: the name itself if the project does not have the module."""
        value: Value = library
        for _step in range(MOST_IMPORTS):
            if not isinstance(value, Library) or value.importer is None:
                break
            module, _, name = value.path.rpartition(".")
            if value.path.startswith(".") and not module.strip("."):
                module += "."
            file = self.project.find(value.importer, module) if module else None
            if file is None:
                break
            found = self._names_of(file, node).find(name)
            if found is None:
                if self.project.find(value.importer, value.path) is not None:
                    break
                raise TranslationError(node, f"module '{module}' does not define '{name}'")
            value = found
        else:
            raise TranslationError(node, f"modules import '{library.last}' from each other in a circle")
        # A wrapper of FlexAttention's function, whose result is not known, is used as the function itself.
        return library if isinstance(value, Captured) and library.last in (*JOINS, *MOD_ARGUMENTS) else value

    def _names_of(self, file: Path, node: ast.AST) -> Scope:
        """The names of a module."""
        if file not in self._modules:
            try:
                tree = self.project.parse(file)
            except SyntaxError as error:
                raise TranslationError(node, f"{file.name} cannot be read: {error.msg}") from None
            scope = self._modules[file] = Scope(rebound=rebound_in(tree))
            with self._apart():
                self.block(tree.body, scope)
        return self._modules[file]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, another module is read, which says nothing about this one."""
        before = dict(vars(self))
        self.strict = self.registers = False
        self.depth = self.steps = 0
        self.guesses, self.seen, self.assigned = {}, {}, {}
        self.made, self.pairs, self.used, self.instantiated = [], [], [], set()
        self.in_class, self.visited, self.defaults_read, self.classes = "", set(), set(), []
        try:
            yield
        finally:
            vars(self).update(before)


def _library(path: str, importer: Path) -> Library:
    """An imported name; of a library that is known, nothing is looked for in the project."""
    return Library(path, None if path.partition(".")[0] in LIBRARIES else importer)
