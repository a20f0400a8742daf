"""The folder `integrations/`: what its modules import, and that importing the ops imports none of them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.support.fresh import python
from tests.support.paths import ROOT

MODULES = sorted((ROOT / "integrations").glob("*.py"))
FRAMEWORKS = {"torch", "jax", "numpy"}


def imports(path: Path) -> set[str]:
    """The top-level names of what a module imports from outside the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_the_library_that_its_name_begins_with(path: Path) -> None:
    others = imports(path) - sys.stdlib_module_names - FRAMEWORKS
    assert all(path.stem == name or path.stem.startswith(f"{name}_") for name in others), others


def test_rendered_modules_are_those_of_the_room() -> None:
    rendered = {path.name for path in (ROOT / "generated/integrations").glob("*.py")}
    assert rendered == {path.name for path in MODULES}


def test_the_readme_names_every_module() -> None:
    text = (ROOT / "integrations/README.md").read_text(encoding="utf-8")
    assert all(f"| `{path.stem}` |" in text for path in MODULES if path.stem != "__init__")


@pytest.mark.parametrize("module", ["generated", "generated.torch", "generated.jax", "generated.integrations"])
def test_importing_the_ops_imports_no_other_library(module: str) -> None:
    found = python(f"import sys, {module}; print([x for x in sys.modules if x.startswith('generated.integrations.')])")
    assert found == "[]\n"
    libraries = {path.stem.partition("_")[0] for path in MODULES} - {"", "variants"}
    assert python(f"import sys, {module}; print(sorted({libraries!r} & sys.modules.keys()))") == "[]\n"
