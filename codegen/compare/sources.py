"""The code of a generated package: which kernels have the same code in two packages."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from codegen.render.code_hash import code_hash, kernel_hash
from codegen.util.errors import CodegenError

JIT_DECORATORS = ("@triton.jit", "@gluon.jit")
"""How a function that Triton compiles begins."""

HASHES_FILE, HASHES_NAME = "_runtime/kernels.py", "KERNEL_HASHES"
"""The file of a package that holds the hash of each kernel's code, and the name of the dict."""

DEVICE_FOLDER = "_runtime/device/"
"""The folder of a package that holds device functions only."""

KernelHashes = dict[str, dict[str, dict[str, str]]]
"""Variant -> mode -> kernel -> hash of its code."""


@dataclass(frozen=True)
class Sources:
    """The Python files of a package, by path relative to its folder."""

    folder: Path
    texts: dict[str, str] = field(repr=False)

    def imports(self, path: str) -> frozenset[str]:
        """The files of the package that a file imports, directly or through other files."""
        found: set[str] = set()
        waiting = [path]
        while waiting:
            importer = waiting.pop()
            new = set(_imported_files(self.texts[importer], importer, self.texts)) - found
            found |= new
            waiting += new
        return frozenset(found)

    def kernels(self) -> dict[str, str]:
        """Name -> file of each kernel that is launched, and not only called by other kernels."""
        compiled = {path for path, text in self.texts.items() if any(word in text for word in JIT_DECORATORS)}
        shared = {path for path in compiled if path.startswith(DEVICE_FOLDER)}
        paths = compiled.difference(shared, *(self.imports(path) for path in compiled))
        return {name: path for path in sorted(paths) for name in _kernels(self.texts[path])}


def read_sources(folder: Path) -> Sources:
    """Read every Python file of a package."""
    paths = sorted(folder.rglob("*.py"))
    return Sources(folder, {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def unchanged_kernels(old: Sources, new: Sources) -> frozenset[str]:
    """The names of the kernels whose code is equal in both packages, and whose used definitions are all equal too."""
    before, after = old.kernels(), new.kernels()

    def is_equal(name: str) -> bool:
        return kernel_hash(before[name], [name], old.texts) == kernel_hash(after[name], [name], new.texts)

    return frozenset(name for name in before.keys() & after.keys() if is_equal(name))


def unchanged_variants(old: Sources, new: Sources, variants: Iterable[str]) -> frozenset[str]:
    """The variants that are equal in every file that can take part in one of their calls."""
    variants = set(variants)
    paths = {path for path in {*old.texts, *new.texts} if not PurePosixPath(path).name.startswith("jax")}
    changed = {path for path in paths if not _same_code(old.texts.get(path), new.texts.get(path))}
    owners = {path.partition("/")[0] for path in changed}
    return frozenset(variants - owners) if owners <= variants else frozenset()


def kernel_hashes(folder: Path) -> KernelHashes:
    """The hashes by which tuned files identify the kernels of a package."""
    path = folder / HASHES_FILE
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CodegenError(f"{path}: {error.strerror}; the hashes of the package's kernels are read from it") from None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == HASHES_NAME:
            hashes: KernelHashes = ast.literal_eval(node.value) if node.value else {}
            return hashes
    raise CodegenError(f"{path}: it has no {HASHES_NAME}")


def _same_code(old: str | None, new: str | None) -> bool:
    """True if two files are equal or differ only in comments and docstrings."""
    if old is None or new is None or old == new:
        return old == new
    return _hash(old) == _hash(new)


_hash = cache(code_hash)


@cache
def _kernels(text: str) -> tuple[str, ...]:
    """The functions of a file that Triton compiles and that no other code of the file uses."""
    body = ast.parse(text).body
    compiled = [node for node in body if isinstance(node, ast.FunctionDef) and _is_compiled(node)]
    used = {each.id for node in body for each in ast.walk(node) if isinstance(each, ast.Name)}
    return tuple(node.name for node in compiled if node.name not in used)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any(f"@{ast.unparse(each)}".startswith(JIT_DECORATORS) for each in function.decorator_list)


@cache
def _relative_imports(text: str) -> frozenset[tuple[int, str, str]]:
    """Level, module and name of each relative import of a file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
    return frozenset((node.level, node.module or "", alias.name) for node in nodes for alias in node.names)


def _imported_files(text: str, path: str, known: dict[str, str]) -> Iterator[str]:
    for level, module, name in _relative_imports(text):
        folder = PurePosixPath(path)
        for _ in range(level):
            folder = folder.parent
        target = folder.joinpath(*module.split(".")) if module else folder
        candidates = (f"{target}.py", f"{target}/__init__.py", f"{target / name}.py", f"{target / name}/__init__.py")
        yield from (candidate for candidate in candidates if candidate in known)
