"""Examples in the docstrings of the generated package: of its ops, its runtime and its other modules."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from codegen.testing.golden import load_manifest
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import ROOT

GENERATED = ROOT / "generated"
BESIDE = ("schedule", "plan", "backward")
"""The functions that an op has as attributes."""


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


def functions(framework: str) -> Iterator[tuple[str, Any]]:
    """What users call: each op with its functions, and the public functions of the modules beside the ops."""
    for name in load_manifest():
        op = getattr(importlib.import_module(f"generated.{framework}"), name)
        yield name, op
        yield from ((f"{name}.{each}", getattr(op, each)) for each in BESIDE if hasattr(op, each))
    for name in ("packing", "paging", "float8", f"{framework}_parallel", *(["jax_nn"] if framework == "jax" else [])):
        module = importlib.import_module(f"generated.{name}")
        for each in module.__all__:
            if inspect.isfunction(function := getattr(module, each)):
                yield f"{name}.{each}", function


def documented(function: Any) -> list[str]:
    """The parameters that a docstring lists under `Args:`."""
    text = inspect.cleandoc(function.__doc__) + "\n"
    found = re.search(r"^Args:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return re.findall(r"^    \*{0,2}([^ ].*?):(?: |$)", found[1], re.MULTILINE) if found else []


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


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_docstrings_list_every_parameter_by_the_name_of_a_call(framework: str) -> None:
    found = {name: (documented(each), list(inspect.signature(each).parameters)) for name, each in functions(framework)}
    listed = {name: pair for name, pair in found.items() if pair[0]}
    assert {"causal", "causal.backward", "float8.hadamard", f"{framework}_parallel.plan"} <= set(listed)
    assert not {name: set(texts) ^ set(names) for name, (texts, names) in listed.items() if set(texts) != set(names)}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_page_on_calls_names_every_argument(framework: str) -> None:
    text = (ROOT / "docs" / "reference" / "calls.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", text))))
    manifest, unnamed = load_manifest(), set()
    for name, function in functions(framework):
        variant = manifest.get(name.removesuffix(".backward"))
        if variant is not None and not name.endswith((".schedule", ".plan")):
            own = {*(variant["tensors"]), *(variant["scalars"]), "q", "k", "v", "keywords"}
            unnamed |= {*inspect.signature(function).parameters} - own - named
    assert not unnamed


@pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_examples_of_every_op_are_right(framework: str) -> None:
    wrong = {module.__name__: text for module in modules(framework) if (text := "".join(failures(module)))}
    assert not wrong


def test_examples_of_shared_modules_are_right() -> None:
    wrong = {name: text for name in shared_modules() if (text := "".join(failures(importlib.import_module(name))))}
    assert not wrong
