"""The generated package as Python: its imports, its documentation, and its plain reference on CPU tensors."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs, Shape, draw_inputs, evaluate, load_manifest, load_op, load_reference
from generated._runtime.core.settings import INTERPRET
from tests.support.fresh import python, warm_python
from tests.support.paths import ROOT

GENERATED = ROOT / "generated"
MANIFEST = load_manifest()
VARIANTS = tuple(MANIFEST)
with_variants = pytest.mark.parametrize("variant", VARIANTS)
# A variant that takes only q, k and v.
SIMPLE = next(name for name, x in MANIFEST.items() if not (x["tensors"] or x["scalars"] or x["sink"] or x["decay"]))
SOURCES = sorted(GENERATED.rglob("*.py"))
# Integrations with libraries of JAX.
OF_JAX = ("equinox", "maxtext")
# The imports of portable kernels and of Hopper's kernels.
KERNEL_IMPORTS = ("\nimport triton\n", "\nfrom triton.experimental import gluon\n")
KERNELS = sorted(
    path for path in GENERATED.glob("*/*.py") if any(x in path.read_text(encoding="utf-8") for x in KERNEL_IMPORTS)
)

reference_runs = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_by(path: Path) -> set[str]:
    """The modules a file imports; those of its own package begin with a dot."""
    found = set()
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


# ------------------------------------------------------------------------------------------------------------- imports


def test_the_package_imports_no_framework() -> None:
    code = (
        "import sys, generated; print(sorted({'torch', 'triton', 'jax', 'numpy'} & sys.modules.keys()), *sys.path[:1])"
    )
    assert python(code).startswith("[]")


@pytest.mark.parametrize(("framework", "other"), [("torch", "jax"), ("jax", "torch")])
def test_one_framework_never_imports_the_other(framework: str, other: str) -> None:
    code = f"import sys, generated.{framework}, generated.{SIMPLE}.{framework}_op; print({other!r} in sys.modules)"
    assert python(code) == "False\n"


def test_without_jax_its_ops_say_so() -> None:
    """The ops of torch still work."""
    code = """
import importlib.util as util, sys
find = util.find_spec
util.find_spec = lambda name, package=None: None if name == "jax" else find(name, package)
import generated.torch
try:
    import generated.jax
except ModuleNotFoundError as error:
    print(error)
"""
    assert warm_python(code) == "the JAX ops need JAX: pip install 'jax>=0.10.1', on a GPU 'jax[cuda13]'\n"


WITHOUT_TRITON = {
    "torch": """
import sys
sys.modules["triton"] = None
import torch, generated.torch as ops
from generated.packing import pack
q = torch.randn(1, 2, 8, 16, requires_grad=True)
ops.causal(q, q, q).sum().backward()
packed = pack([torch.randn(length, 2, 16) for length in (3, 5)])
o = ops.causal(packed.data, packed.data, packed.data, cu_seqlens_q=packed.cu_seqlens)
print(tuple(q.grad.shape), tuple(o.shape))
""",
    "jax": """
import sys
sys.modules["triton"] = None
import jax, generated.jax as ops
from generated.packing import pack
q = jax.numpy.ones((1, 2, 8, 16))
grad = jax.jit(jax.grad(lambda q: ops.causal(q, q, q, layout="bhsd").sum()))(q)
packed = pack([jax.numpy.ones((length, 2, 16)) for length in (3, 5)])
o = ops.causal(packed.data, packed.data, packed.data, cu_seqlens_q=packed.cu_seqlens)
print(grad.shape, o.shape)
""",
}


@pytest.mark.skipif("causal" not in VARIANTS, reason="the spec has no variant 'causal'")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_references_run_without_triton(framework: str) -> None:
    """macOS and Windows have no Triton: there an op, its gradient, and a packed call must run."""
    assert warm_python(WITHOUT_TRITON[framework]) == "(1, 2, 8, 16) (8, 2, 16)\n"


@pytest.mark.skipif("causal" not in VARIANTS, reason="the spec has no variant 'causal'")
@pytest.mark.parametrize(("framework", "op"), [("torch", "this op"), ("jax", "causal")])
def test_interpreted_kernels_without_triton_are_one_error(framework: str, op: str) -> None:
    code = f"import os; os.environ['TRITON_INTERPRET'] = '1'\ntry:{textwrap.indent(WITHOUT_TRITON[framework], '    ')}"
    shown = warm_python(f"{code}\nexcept ModuleNotFoundError as error:\n    print(error)")
    assert shown.startswith(f"{op}: TRITON_INTERPRET=1 asks for kernels, which need Triton: pip install")


def test_a_jax_that_is_too_old_is_named() -> None:
    code = """
import jax
jax.__version_info__, jax.__version__ = (0, 9, 1), "0.9.1"
try:
    import generated.jax
except ImportError as error:
    print(error)
"""
    assert warm_python(code) == "the JAX ops need jax 0.10.1 or newer: 0.9.1 is installed\n"


def test_the_manifest_and_the_package_name_the_same_variants() -> None:
    assert sorted(importlib.import_module("generated").VARIANTS) == sorted(VARIANTS)


@with_variants
def test_every_op_is_imported_by_its_name(variant: str) -> None:
    op = load_op(variant)
    assert op.__name__ == variant
    assert variant in importlib.import_module("generated.torch").__all__


def test_kernel_files_import_triton_and_the_device_library_alone() -> None:
    allowed = {"triton", "triton.language", "triton.experimental", "triton.experimental.gluon"}
    allowed |= {"triton.experimental.gluon.language.nvidia.hopper"}
    faults = {}
    for path in KERNELS:
        others = {
            name for name in imported_by(path) - allowed if name.lstrip(".").rpartition(".")[0] != "_runtime.device"
        }
        if others:
            faults[path.relative_to(GENERATED).as_posix()] = others
    assert not faults


GLUON_KERNELS = [path for stem in ("fwd", "bwd") for path in sorted(GENERATED.rglob(f"hopper_{stem}.py"))]


def test_functions_of_hopper_kernels_take_what_they_read() -> None:
    """Every parameter, local variable and import is read, and every name that is read has a definition."""
    faults = [f"{path}: {fault}" for path in GLUON_KERNELS for fault in _name_faults(ast.parse(path.read_text()))]
    assert not faults, "\n".join(faults)


def _name_faults(module: ast.Module) -> Iterator[str]:
    imports = (alias.name for node in module.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    imported = {name if name != "language" else "gl" for name in imports}
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    classes = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    constants = {
        target.id for node in module.body if isinstance(node, ast.Assign) for target in _names(node, ast.Store)
    }
    yield from (f"{name} is imported and not used" for name in imported - {n.id for n in _names(module, ast.Load)})
    known = imported | classes | constants | {function.name for function in functions} | set(dir(builtins))
    for function in functions:
        parameters = {argument.arg for argument in function.args.args}
        read = {name.id for name in _names(function, ast.Load)}
        stored = {name.id for name in _names(function, ast.Store)}
        unread = {name for name in (parameters | stored) - read if not name.startswith("_")}
        yield from (f"{function.name} does not read {name}" for name in sorted(unread))
        yield from (f"{function.name} reads {name}" for name in sorted(read - parameters - stored - known))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)]


@with_variants
def test_every_variant_has_its_kernel_files(variant: str) -> None:
    names = {path.name for path in KERNELS if path.parent.name == variant}
    assert names >= {"portable.py", "hopper_fwd.py", "hopper_bwd.py"}


def test_package_imports_neither_the_generator_nor_the_other_framework() -> None:
    others = {}
    for path in SOURCES:
        own = {name.split(".")[0] for name in imported_by(path) if not name.startswith(".")}
        is_integration = path.parent.name == "integrations"
        is_jax = (
            path.name.startswith("jax")
            or "jax" in path.relative_to(GENERATED).parts
            or (is_integration and path.stem in OF_JAX)
        )
        frameworks = {"jax", "numpy", "triton"} if is_jax else {"torch", "triton"}
        if is_integration:
            frameworks.add(path.stem.partition("_")[0])  # the library that it hooks into
        # Plans of calls over several GPUs are made of numbers on the host.
        if path.parent.name == "parallel" or path.name == "work.py":
            frameworks.add("numpy")
        if unknown := own - {*sys.stdlib_module_names, *frameworks}:
            others[path.relative_to(GENERATED).as_posix()] = unknown
    assert not others


def test_a_copy_under_another_name_works_beside_the_first(tmp_path: Path) -> None:
    """The custom operators of both packages do not collide, and each package loads its own files."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(GENERATED, tmp_path / "generated", ignore=ignored)
    shutil.copytree(GENERATED, tmp_path / "vendored", ignore=ignored)
    code = f"""
import torch, generated.torch, vendored.torch
q = torch.randn(1, 2, 5, 16)
first, second = generated.torch.{SIMPLE}, vendored.torch.{SIMPLE}
assert first is not second and torch.equal(first(q, q, q), second(q, q, q))
assert torch.ops.generated.{SIMPLE}_fwd.default is not torch.ops.vendored.{SIMPLE}_fwd.default
print(first.__module__, second.__module__)
"""
    assert warm_python(code, tmp_path) == f"generated.{SIMPLE}.torch_op vendored.{SIMPLE}.torch_op\n"


def test_two_packages_whose_operators_have_one_name_are_refused(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(GENERATED, tmp_path / "model" / "attention", ignore=ignored)
    shutil.copytree(GENERATED, tmp_path / "model_attention", ignore=ignored)
    code = """
import sys, model.attention.torch
try:
    import model_attention.torch
except ImportError as error:
    print(error)
for name in [name for name in sys.modules if name.startswith("model")]:
    del sys.modules[name]
import model.attention.torch
"""
    assert warm_python(code, tmp_path) == (
        "model_attention: the operators of the package model.attention are torch.ops.model_attention, too; rename one "
        "of both\n"
    )


def test_the_reference_needs_no_triton() -> None:
    """If Triton is not installed, the ops can be imported, and compute on the CPU."""
    code = f"""
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
import generated.torch as ops
q = torch.randn(1, 2, 5, 16)
print(list(getattr(ops, "{SIMPLE}")(q, q, q).shape))
"""
    assert warm_python(code) == "[1, 2, 5, 16]\n"


# ---------------------------------------------------------------------------------------------------------- docstrings


def test_every_module_has_a_docstring() -> None:
    assert not [path.relative_to(GENERATED).as_posix() for path in SOURCES if not ast.get_docstring(syntax_of(path))]


@with_variants
def test_an_op_documents_every_argument(variant: str) -> None:
    op = load_op(variant)
    doc = inspect.getdoc(op) or ""
    assert " ".join(doc.split()).startswith(MANIFEST[variant]["doc"])
    for name in inspect.signature(op).parameters:
        assert f"\n    {name}: " in doc, name
    for section in ("Args:", "Returns:", "Raises:"):
        assert f"\n{section}\n" in doc
    assert load_reference(variant).__doc__


# ----------------------------------------------------------------------------------------------------------- reference


def inputs_of(variant: str, dtype: torch.dtype = torch.float32, seq: int = 7, dim: int = 16) -> Inputs:
    shape = Shape(batch=2, heads=4, kv_heads=2, seq=seq, dim=dim)
    inputs = draw_inputs(MANIFEST[variant], shape, dtype=torch.float32, device="cpu")
    return inputs.double() if dtype == torch.float64 else inputs


@with_variants
def test_gradients_of_the_reference(variant: str) -> None:
    """autograd's derivative equals the difference quotient: the reference has no kink, NaN or detached part."""
    inputs = inputs_of(variant, torch.float64, seq=4, dim=3)
    leaves = inputs.leaves()
    fixed: dict[str, Any] = {name: x for name, x in inputs.tensors.items() if name not in leaves}
    names = list(leaves)[3:]

    def function(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Any:
        return load_reference(variant)(
            q, k, v, **fixed, **dict(zip(names, own, strict=True)), **inputs.scalars, return_lse=True
        )

    assert torch.autograd.gradcheck(function, list(leaves.values()))


@reference_runs
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@with_variants
def test_an_op_on_the_cpu_is_its_reference(variant: str, layout: str) -> None:
    inputs = inputs_of(variant)
    if layout == "bshd":
        q, k, v, do = (x.detach().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        inputs = Inputs(
            q=leaves[0],
            k=leaves[1],
            v=leaves[2],
            do=do,
            dlse=inputs.dlse,
            tensors=inputs.tensors,
            scalars=inputs.scalars,
        )
    got = evaluate(load_op(variant), inputs, layout=layout)
    want = evaluate(load_reference(variant), inputs, layout=layout)
    for name, wanted in want.items():
        assert torch.equal(got[name], wanted), name


@reference_runs
@with_variants
def test_options_reach_the_reference(variant: str) -> None:
    inputs = inputs_of(variant)
    offsets = torch.tensor([0, -3], dtype=torch.int32)
    for options in ({"scale": -0.5}, {"q_offset": -2}, {"q_offset": "end"}, {"q_offset": offsets}):
        got = evaluate(load_op(variant), inputs, **options)
        for name, wanted in evaluate(load_reference(variant), inputs, **options).items():
            assert torch.equal(got[name], wanted), (name, options)
            assert not got[name].isnan().any(), (name, options)


@reference_runs
@with_variants
def test_the_reference_in_16_bits(variant: str) -> None:
    """bfloat16 on the CPU: o in bfloat16, lse in float32, the same numbers as in float64 up to one rounding."""
    inputs = draw_inputs(
        MANIFEST[variant],
        Shape(batch=1, heads=2, kv_heads=1, seq=9, dim=16),
        dtype=torch.bfloat16,
        device="cpu",
    )
    got = evaluate(load_op(variant), inputs)
    assert got["o"].dtype == torch.bfloat16
    assert got["lse"].dtype == torch.float32
    errors = golden.relative_errors(got, evaluate(load_reference(variant), inputs.double()))
    assert max(errors.values()) <= golden.BOUND[torch.bfloat16], errors


def test_strings_of_functions_are_docstrings() -> None:
    """A statement before a docstring makes it an expression without effect."""
    found = [
        f"{path.relative_to(GENERATED)}:{statement.lineno}"
        for path in SOURCES
        for function in ast.walk(syntax_of(path))
        if isinstance(function, ast.FunctionDef)
        for statement in function.body[1:]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ]
    assert not found
