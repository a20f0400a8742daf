"""Which modules of a rendered package a kernel of the hub may have.

The hub's rules: a module imports the standard library, torch, and other modules of the kernel by relative names.
Triton comes with torch. Modules that need anything else, such as JAX, numpy or transformers, are left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from codegen.hub.python import check_python, guarded

LIBRARIES = frozenset({"torch", "triton"})
"""Libraries that a module may import besides the standard library and the kernel itself."""

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True, kw_only=True)
class _Imports:
    """The imports of a module: `at_once` those that run with it, `all` also those inside functions and conditions."""

    at_once: tuple[Import, ...]
    all: tuple[Import, ...]


def accepted(texts: Mapping[str, str]) -> dict[str, str]:
    """Those of a package's modules (path -> text) that the hub takes.

    A module is left out if it imports another library anywhere, or if importing it imports a module that is left out. A
    folder is left out if only its `__init__.py` would remain.

    >>> sorted(accepted({"__init__.py": "", "a.py": "from . import b", "b.py": "import jax", "c.py": "import torch"}))
    ['__init__.py', 'c.py']

    Raises:
        CodegenError: a module that Python 3.10 does not run.
    """
    imports = {path: _imports(text) for path, text in texts.items()}
    edges = {path: set(_own_modules(path, each.at_once, texts)) for path, each in imports.items()}
    left_out = {path for path, each in imports.items() if not _libraries(each.all) <= LIBRARIES}
    while more := {path for path in imports.keys() - left_out if edges[path] & left_out}:
        left_out |= more
    kept = texts.keys() - left_out
    filled = {parent for path in kept if not path.endswith("__init__.py") for parent in PurePosixPath(path).parents}
    empty = {path for path in kept if path.endswith("/__init__.py") and PurePosixPath(path).parent not in filled}
    shipped = {path: texts[path] for path in sorted(kept - empty)}
    for path, text in shipped.items():
        check_python(path, text, imports[path].all)
    return {path: guarded(text) for path, text in shipped.items()}


def _imports(text: str) -> _Imports:
    body = ast.parse(text).body
    at_once = tuple(node for node in body if isinstance(node, Import))
    return _Imports(at_once=at_once, all=tuple(_nested(body)))


def _nested(body: Iterable[ast.AST]) -> Iterator[Import]:
    """The imports among statements and in their bodies."""
    for node in body:
        if isinstance(node, Import):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _nested(getattr(node, part, ()))


def _libraries(imports: Iterable[Import]) -> set[str]:
    """The top-level names of what is imported from outside the package and the standard library."""
    names: set[str] = set()
    for node in imports:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.level == 0:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def _own_modules(path: str, imports: Iterable[Import], known: Mapping[str, str]) -> Iterator[str]:
    """The modules of the package among what a module imports."""
    folder = PurePosixPath(path).parent
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [folder, *folder.parents][node.level - 1].joinpath(*(node.module or "").split("."))
            for place in (base, *(base / alias.name for alias in node.names)):
                yield from (file for file in (f"{place}.py", (place / "__init__.py").as_posix()) if file in known)
