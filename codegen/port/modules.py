"""Finds and parses the modules of a project that a ported file imports."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

LIBRARIES = frozenset(("torch", "numpy", "jax", *sys.stdlib_module_names))
"""Modules whose functions have counterparts or none; a folder of the project with such a name is not read."""

_MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What the top folder of a project has."""


class Project:
    """A file, and the modules that it imports, each parsed once."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self._trees: dict[Path, ast.Module | SyntaxError] = {}
        self._found: dict[tuple[Path, str], Path | None] = {}
        self._files: dict[ast.AST, Path] = {}

    def file_of(self, node: ast.AST) -> Path:
        """The file that a node stands in."""
        return self._files.get(node, self.path)

    def moved(self, node: ast.AST, place: ast.AST) -> None:
        """Note that a node was made of another one, so that both stand in one file."""
        if place in self._files:
            self._files[node] = self._files[place]

    def find(self, importer: Path, module: str) -> Path | None:
        """The file of a module as `importer` names it, with a dot in front for each level of a relative import; None
        if the project does not have it."""
        key = importer, module
        if key not in self._found:
            self._found[key] = _find(importer, module)
        return self._found[key]

    def parse(self, path: Path) -> ast.Module:
        """The syntax of a module; raises `SyntaxError`."""
        if path not in self._trees:
            try:
                tree = ast.parse(path.read_bytes())
                self._trees[path] = tree
                # Messages name files as the command names the ported one.
                start = self.path.absolute().parent
                shown = Path(os.path.normpath(self.path.parent / os.path.relpath(path, start)))
                self._files |= dict.fromkeys(ast.walk(tree), shown)
            except (OSError, ValueError, RecursionError) as error:
                self._trees[path] = SyntaxError(str(error))
            except SyntaxError as error:
                self._trees[path] = error
        found = self._trees[path]
        if isinstance(found, SyntaxError):
            raise found
        return found


def _find(importer: Path, module: str) -> Path | None:
    words = module.lstrip(".").split(".") if module.strip(".") else []
    level = len(module) - len(module.lstrip("."))
    folder = importer.absolute().parent
    if level:
        above = [folder, *folder.parents]
        return _in_folder(above[level - 1], words) if level <= len(above) else None
    return next((found for root in _roots(folder) if (found := _in_folder(root, words))), None)


def _roots(folder: Path) -> list[Path]:
    """The folders that absolute imports start from: the file's own, and those above it in the same project."""
    above = [folder, *folder.parents]
    top = next((place for place in above if any((place / marker).exists() for marker in _MARKERS)), None)
    if top is None:
        top = next(place for place in above if not (place / "__init__.py").exists() or place == place.parent)
    return [*above[: above.index(top) + 1], top / "src"]


def _in_folder(folder: Path, words: list[str]) -> Path | None:
    place = folder.joinpath(*words)
    choices = (place / "__init__.py", place.with_name(f"{place.name}.py")) if words else (place / "__init__.py",)
    return next((choice for choice in choices if choice.is_file()), None)
