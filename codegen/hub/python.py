"""Which Python a kernel of the hub runs on: 3.10, the oldest for which there is a torch 2.11, though rendered packages
need 3.11. The hub itself asks for 3.9, whose grammar the modules keep to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from codegen.util.errors import CodegenError

GRAMMAR = (3, 9)

GUARDED = "dataclass_transform"
"""A name that `typing` has since Python 3.11 and that only type checkers read. Modules define a substitute that does
nothing for Python 3.10."""

_GUARD = f"""
try:
    from typing import {GUARDED}
except ImportError:

    def {GUARDED}():
        return lambda decorated: decorated
"""

NEWER = {
    "collections.abc": {"Buffer"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "FlagBoundary", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "fma", "sumprod"},
    "operator": {"call"},
    "typing": {
        *("LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs"),
        *("TypeVarTuple", "Unpack", "assert_never", "assert_type", "override", "reveal_type"),
    },
    "warnings": {"deprecated"},
}
"""Names that the standard library has only since Python 3.11 or later: module -> names."""

NEWER_MODULES = frozenset({"tomllib"})


_NAMED = re.compile(
    r"(?<![\w.])(?:"
    + "|".join(rf"{re.escape(module)}\.(?:{'|'.join(sorted(names))})" for module, names in NEWER.items())
    + r")\b"
)
_STATEMENTS = re.compile(r"^\s*(?:match\b.*:|except\s*\*.*:|type \w+.*=)", re.MULTILINE)
"""Text that may be syntax which Python 3.9 does not have. Only modules with such text are parsed, because parsing a
whole package takes seconds."""


def check_python(path: str, text: str, imports: Iterable[ast.Import | ast.ImportFrom]) -> None:
    """Raise unless Python 3.10 can run a module with these imports.

    Raises:
        CodegenError: syntax that Python 3.9 does not have, or a name that Python 3.10 does not have.
    """
    if _STATEMENTS.search(text):
        try:
            ast.parse(text, path, feature_version=GRAMMAR)
        except SyntaxError as error:
            raise CodegenError(
                f"{path}:{error.lineno}: expected the grammar of Python 3.9, as the hub does: {error.msg}"
            ) from None
    found = [(node.lineno, name) for node in imports for name in _newer(node)]
    if _NAMED.search(text):
        attributes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
        named = ((node.lineno, ast.unparse(node)) for node in attributes)
        found += [(line, name) for line, name in named if _NAMED.fullmatch(name)]
    if found:
        line, name = min(found)
        raise CodegenError(f"{path}:{line}: expected what Python 3.10 has, got {name}")


def guarded(text: str) -> str:
    """A module whose import of `GUARDED`, if it has one, passes on Python 3.10 too.

    >>> guarded("import os\\n")
    'import os\\n'
    >>> guarded("from typing import Any, dataclass_transform\\n").splitlines()[:3]
    ['from typing import Any', '', 'try:']
    """
    if GUARDED not in text:
        return text
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module == "typing" and node.lineno == node.end_lineno:
            others = [alias for alias in node.names if alias.name != GUARDED]
            if len(others) < len(node.names):
                kept = ast.unparse(ast.ImportFrom("typing", others, 0)) + "\n" if others else ""
                lines[node.lineno - 1] = kept + _GUARD
    return "".join(lines)


def _newer(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The imported names that Python 3.10 does not have."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in NEWER_MODULES)
    elif node.level == 0:
        newer = NEWER.get(str(node.module), set())
        names = (alias.name for alias in node.names)
        yield from (f"{node.module}.{name}" for name in names if name in newer or node.module in NEWER_MODULES)
