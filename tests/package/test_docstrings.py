"""Examples in the docstrings of the generated package: of its ops, its runtime and its other modules."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest

from codegen.testing.golden import load_manifest
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import ROOT

GENERATED = ROOT / "generated"


def shared_modules() -> list[str]:
    """The modules that all variants share and that hold an example."""
    shared = [*GENERATED.glob("*.py"), *(GENERATED / "_runtime").rglob("*.py")]
    # A hook is imported if the library with which its name begins is installed.
    hooks = (GENERATED / "integrations").glob("[a-z]*.py")
    own = ("variants", "flash", "sdpa")
    hooks = (path for path in hooks if (name := path.stem.partition("_")[0]) in own or find_spec(name))
    shared += hooks
    files = [path for path in shared if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sorted(files)]


def modules(framework: str) -> Iterator[ModuleType]:
    for variant in load_manifest():
        yield importlib.import_module(f"generated.{variant}.{framework}_op")
    yield importlib.import_module(f"generated.{framework}")


def failures(module: ModuleType) -> list[str]:
    """doctest's reports of the examples of a module that give other results than they show."""
    found: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=found.append)
    return found


def test_failures_reports_an_example_that_is_wrong() -> None:
    module = ModuleType("module", doc=">>> 1 + 1\n3\n")
    assert "Expected:\n    3\nGot:\n    2\n" in "".join(failures(module))


@pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_examples_of_every_op_are_right(framework: str) -> None:
    wrong = {module.__name__: text for module in modules(framework) if (text := "".join(failures(module)))}
    assert not wrong


def test_examples_of_shared_modules_are_right() -> None:
    wrong = {name: text for name in shared_modules() if (text := "".join(failures(importlib.import_module(name))))}
    assert not wrong
