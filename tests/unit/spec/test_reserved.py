"""No argument of a variant has a name that generated code uses itself: one of the two would overwrite the other."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, TensorSpec, Type
from codegen.plan.ops.torch_modules import class_name
from codegen.spec.model import Variant
from codegen.spec.names import OP_ARGUMENTS, argument_problem
from codegen.spec.reserved import WORDS
from codegen.spec.symbols import is_used, symbolised
from tests.support.paths import ROOT

GENERATED = ROOT / "generated"
VARIANTS: dict[str, Any] = json.loads((GENERATED / "MANIFEST.json").read_text(encoding="utf-8"))["variants"]

# The files that read a variant's own tensors and scalars; files of the log-decay do not.
KERNELS = ("portable.py", "hopper_fwd.py", "hopper_bwd.py", "launch.py")
MODES = [f"{mode}/{file}" for mode in ("packed", "segmented") for file in KERNELS]
# Of variants whose score is the scaled product.
SPLIT = [f"{mode}hopper_split.py" for mode in ("", "packed/", "segmented/")]
FILES = (
    *KERNELS,
    *MODES,
    "torch_op.py",
    "torch_reference.py",
    "jax_op.py",
    "jax_reference.py",
)


def module_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def local_names(tree: ast.Module, own: list[str]) -> Iterator[str]:
    """Parameters and variables of the functions that take the variant's own arguments, or could take them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and {"k", "arguments"} & {
            a.arg.removesuffix("_ptr").strip("_") for a in node.args.args
        }:
            yield from (a.arg for a in [*node.args.args, *node.args.kwonlyargs] if a.arg not in own)
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from (name.id for name in stored if name.id not in own)


OF_PRODUCTS = [(variant, file) for variant in VARIANTS for file in SPLIT if (GENERATED / variant / file).is_file()]
ON_PAGES = [
    (variant, f"paged/{file}")
    for variant in VARIANTS
    for file in ("portable.py", "hopper_fwd.py", "hopper_latent.py", "launch.py")
    if (GENERATED / variant / "paged" / file).is_file()
]


def names_of(variant: str, file: str) -> set[str]:
    """The names that a file uses, all of which must be known."""
    entry = VARIANTS[variant]
    own = [*entry["tensors"], *entry["scalars"], "g", "sink"]
    tree = ast.parse((GENERATED / variant / file).read_text(encoding="utf-8"))
    used = {*module_names(tree), *local_names(tree, own)}
    derived = re.compile(rf"(.*_)?d?({'|'.join(own)})(_.*)?|{variant}_\w+|{variant}|{class_name(variant)}|_.*")
    known = [name for name in used if is_used(name) or argument_problem(name, {}) is not None]
    free = sorted(name for name in used if not derived.fullmatch(name) and name not in known)
    assert not free, (
        f"an argument could have these names in generated code; add them to codegen/spec/reserved.py: {free}"
    )
    return used


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_generated_code_are_known(variant: str, file: str) -> None:
    assert len(names_of(variant, file)) > 10


@pytest.mark.parametrize(("variant", "file"), OF_PRODUCTS)
def test_names_of_a_launch_for_each_gradient_are_known(variant: str, file: str) -> None:
    assert len(names_of(variant, file)) > 10


@pytest.mark.parametrize(("variant", "file"), ON_PAGES)
def test_names_of_kernels_on_pages_are_known(variant: str, file: str) -> None:
    assert len(names_of(variant, file)) > 8


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Every name that a module binds: by an import, a definition, a parameter or an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def template_words(text: str) -> set[str]:
    """The words of a template, comments left out."""
    return set(re.findall(r"\w+", re.sub(r"\{#.*?#\}|^ *#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)))


def words_in_strings(tree: ast.Module) -> set[str]:
    """The words of a module's string literals, docstrings left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return {word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)}


def test_reserved_words_are_used() -> None:
    """The checked-in package uses them, or a template or a plan does for variants that the package does not have."""
    packaged = [path for variant in VARIANTS for path in (GENERATED / variant).rglob("*.py")]
    used = {name for path in packaged for name in bound_names(ast.parse(path.read_text(encoding="utf-8")))}
    for path in (ROOT / "templates").rglob("*.jinja"):
        used |= template_words(path.read_text(encoding="utf-8"))
    for path in (ROOT / "codegen" / "plan").rglob("*.py"):
        used |= words_in_strings(ast.parse(path.read_text(encoding="utf-8")))
    unused = sorted(WORDS - used)
    assert not unused, f"generated code no longer uses these; remove them from codegen/spec/reserved.py: {unused}"


def variant_of(*names: str) -> Variant:
    tensors = {name: TensorSpec(name=name, dims=("h",), grad=True) for name in names}
    reads: list[Expr] = [Load(Type.FLOAT, name, (expr.int_var("h"),)) for name in names]
    score = reduce(expr.add, reads)
    return Variant(name="x", line=1, entry="", score=score, tensors=tensors)


@pytest.mark.parametrize(
    ("names", "symbols"),
    [
        (("slope",), ("slope",)),
        (("span",), ("own_span",)),
        (("span", "own_span"), ("own_span_arg", "own_span")),
        (("blocks",), ("own_blocks_arg",)),
        (("x_ptr", "x"), ("own_x_ptr_arg", "x")),
        (("w", "dw", "dw_heads"), ("w", "own_dw", "own_dw_heads")),
        (("dsink",), ("own_dsink",)),
        (("len", "torch", "term_12"), ("own_len_arg", "own_torch", "own_term_12")),
    ],
)
def test_arguments_get_symbols_of_their_own(names: tuple[str, ...], symbols: tuple[str, ...]) -> None:
    found = symbolised(variant_of(*names))
    assert tuple(found.tensors) == symbols
    assert tuple(tensor.name for tensor in found.tensors.values()) == symbols
    assert found.score is not None
    assert tuple(load.tensor for load in expr.loads(found.score)) == symbols
    assert tuple(found.keywords.get(symbol, symbol) for symbol in symbols) == names
    assert not any(name in OP_ARGUMENTS for name in symbols)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_no_argument_of_an_entry_has_the_name_of_an_ops_argument(framework: str) -> None:
    for variant in ("causal", "forgetting", "gpt_oss"):
        op = getattr(importlib.import_module(f"generated.{framework}"), variant)
        assert set(inspect.signature(op).parameters) <= set(OP_ARGUMENTS)
    assert argument_problem("q_scale", {}) is not None
