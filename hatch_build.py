# SPDX-License-Identifier: Apache-2.0
"""Build hook of the wheel: everything is installed in one top-level package, `attention_codegen`.

    generated/          -> attention_codegen/            (`tool.hatch.build.targets.wheel.sources` in pyproject.toml)
    codegen/            -> attention_codegen/codegen/
    templates/, runtime/, integrations/, variants.yaml, library.yaml -> attention_codegen/codegen/_data/

In a checkout the generator's modules import each other as `codegen.x`. In the wheel that package is called
`attention_codegen.codegen`, so the hook renames those imports on the way into the wheel. It edits import statements
alone, at the positions that Python's parser reports.

An editable installation puts the checkout on `sys.path`, where the packages are `codegen` and `generated`. Beside
that it installs a module `attention_codegen` that finds both in the checkout: the console script needs it.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_PACKAGE = "attention_codegen"
GENERATOR = "codegen"
DATA = ("templates", "runtime", "integrations", "variants.yaml", "library.yaml")
"""Files and folders of the checkout that the generator reads."""


EDITABLE = '''"""The rendered ops and the generator of a checkout, under the name that they have in a wheel."""

from generated import VARIANTS as VARIANTS

__path__ = [{ops!r}, {root!r}]
'''
"""The module `attention_codegen` of an editable installation."""


class OnePackage(BuildHookInterface[Any]):
    """Adds the generator and the files that it reads to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if (root / "generated" / GENERATOR).exists():
            raise ValueError(f"a variant named '{GENERATOR}' would overwrite the generator in the wheel: rename it")
        self._folder = Path(tempfile.mkdtemp(prefix="attention-codegen-"))
        if version == "editable":
            module = self._folder / "__init__.py"
            module.write_text(EDITABLE.format(ops=str(root / "generated"), root=str(root)), encoding="utf-8")
            build_data["force_include_editable"][str(module)] = f"{WHEEL_PACKAGE}/__init__.py"
            return
        write_renamed(root / GENERATOR, self._folder)
        included = {str(self._folder): f"{WHEEL_PACKAGE}/{GENERATOR}"}
        included |= {str(root / name): f"{WHEEL_PACKAGE}/{GENERATOR}/_data/{name}" for name in DATA}
        build_data["force_include"].update(included)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        shutil.rmtree(self._folder)


def write_renamed(source: Path, target: Path) -> None:
    """Copy the generator's package from one folder to another, with its imports renamed."""
    for path in sorted(source.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            copy.write_text(renamed(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8", newline="\n")
        else:
            shutil.copyfile(path, copy)


def renamed(text: str, file: str = "<text>") -> str:
    """A module's source with `codegen` renamed to `attention_codegen.codegen` in its import statements.

    >>> renamed("from codegen.ir import expr")
    'from attention_codegen.codegen.ir import expr'
    >>> renamed("import codegen.files as files, os")
    'import attention_codegen.codegen.files as files, os'

    An import that binds the name `codegen` itself raises `ValueError`: the code that uses the name would still call
    the package by its old name.
    """
    lines = [line.encode() for line in text.split("\n")]  # the parser counts columns in bytes of UTF-8
    for line, column in sorted(_positions(text, file), reverse=True):
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        if not after.startswith(GENERATOR.encode()):
            raise ValueError(f"{file}:{line}: expected the module's name right after `from`, on the same line")
        lines[line - 1] = before + f"{WHEEL_PACKAGE}.".encode() + after
    return b"\n".join(lines).decode()


def _positions(text: str, file: str) -> list[tuple[int, int]]:
    """Line (from 1) and column (from 0) of each absolute import's module name, where that is in the generator."""
    found = []
    for node in ast.walk(ast.parse(text, file)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_in_generator(node.module):
            found.append((node.lineno, node.col_offset + len("from ")))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_in_generator(alias.name):
                    if alias.asname is None:
                        raise ValueError(f"{file}:{node.lineno}: write `from package import module` for {alias.name}")
                    found.append((alias.lineno, alias.col_offset))
    return found


def _is_in_generator(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == GENERATOR
