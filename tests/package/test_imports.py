"""Imports of the package load no variant, mode or kernel before it is needed; fresh processes find operators, ops and
modules of `torch.nn` by their names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fresh import warm_python
from tests.support.paths import ROOT
from tests.support.rendering import importable

RUNTIME = {"_runtime", "_runtime.core", "_runtime.core.lazy"}
TORCH = {"", "torch", *RUNTIME, "_runtime.torch", "_runtime.torch.operators"}
CALLS = {
    "torch": "q = torch.ones(1, 2, 8, 16, requires_grad=True)",
    "jax": "q = jax.numpy.ones((1, 8, 2, 16))",
}
GRADIENTS = {
    "torch": "op(q, q, q).sum().backward()",
    "jax": "jax.grad(lambda q: op(q, q, q).sum())(q)",
}
PACKED = {
    "torch": "p = q[0].detach(); op(p, p, p, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32))",
    "jax": "p = q[0]; op(p, p, p, cu_seqlens_q=jax.numpy.array([0, 3, 8]))",
}
SPEC = "variants: {causal: {mask: q_idx >= kv_idx}}"

pytestmark = pytest.mark.skipif(not (ROOT / "generated/causal").is_dir(), reason="the spec has no variant 'causal'")
with_frameworks = pytest.mark.parametrize("framework", ["torch", "jax"])


def loaded_by(code: str, package: str = "generated", cwd: Path = ROOT, *, interpret: bool = False) -> set[str]:
    """The modules of a package that some code loads, by their names in the package."""
    listing = f"import sys; print('LOADED', *[name for name in sys.modules if name.split('.')[0] == {package!r}])"
    last = warm_python(f"{code}\n{listing}", cwd, interpret=interpret).splitlines()[-1]
    return {name.removeprefix(package).removeprefix(".") for name in last.split()[1:]}


def outside_runtime(modules: set[str]) -> set[str]:
    return {name for name in modules if not name.startswith("_runtime")}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package of one variant."""
    with importable(tmp_path_factory.mktemp("small"), "small_package", SPEC) as package:
        yield package


# ------------------------------------------------------------------------------------------------------------- imports


def test_importing_the_torch_ops_loads_no_variant() -> None:
    assert loaded_by("import generated.torch") == TORCH
    assert loaded_by("import generated.torch.nn") == TORCH | {"torch.nn"}


@pytest.mark.parametrize("module", ["jax", "jax_nn"])
def test_importing_the_jax_ops_loads_no_variant(module: str) -> None:
    assert outside_runtime(loaded_by(f"import generated.{module}")) == {"", "jax", module}


def test_importing_the_jax_ops_loads_nothing_but_the_check_of_jax() -> None:
    assert loaded_by("import generated.jax") == {"", "jax", *RUNTIME, "_runtime.jax", "_runtime.jax.versions"}


@with_frameworks
def test_an_import_loads_as_many_modules_whatever_the_number_of_variants(framework: str, small: Path) -> None:
    code = "import {0}.{1}; {0}.{1}.causal"
    for part in (slice(1), slice(2)):
        found = [
            loaded_by(";".join(code.split(";")[part]).format(name, framework), name, folder)
            for name, folder in (("generated", ROOT), (small.name, small.parent))
        ]
        assert found[0] == found[1]


@with_frameworks
def test_an_op_is_imported_without_launches_and_kernels(framework: str) -> None:
    found = outside_runtime(loaded_by(f"from generated.{framework} import causal"))
    own = {f"causal.{framework}_op", f"causal.{framework}_reference"}
    modes = {"causal", "causal.packed", "causal.paged", "causal.segmented"}
    assert found - own == {"", framework, *modes}


def test_a_module_of_torch_nn_is_imported_alone() -> None:
    found = outside_runtime(loaded_by("from generated.torch.nn import Causal; Causal()"))
    assert {name.split(".")[0] for name in found} == {"", "torch", "causal"}
    assert "causal.torch_op" in found


@with_frameworks
def test_a_call_of_the_reference_imports_no_kernel(framework: str) -> None:
    code = f"import {framework}\nfrom generated.{framework} import causal as op\n{CALLS[framework]}"
    found = loaded_by(f"{code}\n{GRADIENTS[framework]}")
    assert {name.rpartition(".")[2] for name in outside_runtime(found)} <= {
        *("", framework, "causal", "packed", "paged", "segmented"),
        *("launch", f"{framework}_op", f"{framework}_reference"),
    }
    assert not any(name.startswith(("causal.packed.", "causal.paged.", "causal.segmented.")) for name in found)


@with_frameworks
def test_a_call_imports_the_kernels_that_it_launches(framework: str) -> None:
    """A call imports the kernels of its own mode and family."""
    code = f"import {framework}\nfrom generated.{framework} import causal as op\n{CALLS[framework]}"

    def kernels(*calls: str) -> set[str]:
        found = loaded_by("\n".join([code, *calls]), interpret=True)
        own = {name for name in found if not name.startswith("_runtime.")}
        return {name for name in own if name.rpartition(".")[2].startswith(("portable", "hopper", "block"))}

    assert kernels("op(q, q, q)") == {"causal.portable"}
    assert kernels(GRADIENTS[framework]) == {"causal.portable"}
    assert kernels(PACKED[framework]) == {"causal.packed.portable"}


# --------------------------------------------------------------------------------------------------------------- names


def listed_names(path: Path) -> tuple[set[str], set[str]]:
    """The names that a type checker sees imported in a module, and those that `__getattr__` serves."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    served = {
        key.value.rpartition(".")[2]
        for node in ast.walk(branch.orelse[0])
        for key in (node.keys if isinstance(node, ast.Dict) else node.args if isinstance(node, ast.Call) else ())
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return seen, served


@pytest.mark.parametrize("path", ["torch/__init__.py", "torch/nn.py", "jax.py", "causal/__init__.py"])
def test_type_checkers_see_what_is_served(path: str) -> None:
    seen, served = listed_names(ROOT / "generated" / path)
    assert seen == served
    assert len(seen) > 3


@pytest.mark.parametrize("module", ["torch", "torch.nn", "jax", "causal", "causal.packed"])
def test_dir_lists_what_is_served(module: str) -> None:
    found = importlib.import_module(f"generated.{module}")
    assert set(dir(found)) >= set(found.__all__)
    assert all(hasattr(found, name) for name in dir(found))
    with pytest.raises(AttributeError, match=rf"^module 'generated\.{module}' has no attribute 'nothing'$"):
        _ = found.nothing


def test_what_was_read_is_an_ordinary_attribute() -> None:
    """No later call looks a name up through `__getattr__`."""
    code = """
import torch, generated.torch as ops, generated.causal as causal
q = torch.ones(1, 2, 8, 16, requires_grad=True)
ops.causal(q, q, q).sum().backward()
print("causal" in vars(ops), *sorted({"launch", "portable", "hopper_bwd"} & vars(causal).keys()))
"""
    assert warm_python(code, interpret=True).split() == ["True", "launch", "portable"]


# ---------------------------------------------------------------------------------------------------- fresh processes


def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    """`import generated.torch` suffices: the operator is registered when the program names it."""
    save = f"""
import torch, generated.torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = generated.torch.nn.Alibi(2)
    def forward(self, q, k, v, cu_seqlens):
        dense = self.attention(q, k, v)
        packed = generated.torch.causal(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens)
        return dense, packed
q, k, v = torch.randn(3, 1, 2, 8, 16)
arguments = (q, k, v, torch.tensor([0, 1, 2], dtype=torch.int32))
model = Model()
program = torch.export.export(model, arguments)
names = {{str(node.target) for node in program.graph.nodes}}
assert {{"generated.alibi_fwd.default", "generated.causal_packed_fwd.default"}} <= names, names
torch.export.save(program, {str(tmp_path / "program.pt2")!r})
torch.save((arguments, model(*arguments)), {str(tmp_path / "call.pt")!r})
"""
    warm_python(save)
    load = f"""
import torch, generated.torch
program = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
arguments, wanted = torch.load({str(tmp_path / "call.pt")!r})
print([torch.equal(x, want) for x, want in zip(program(*arguments), wanted)])
"""
    assert warm_python(load) == "[True, True]\n"


def test_ops_and_modules_are_pickled_by_name(tmp_path: Path) -> None:
    """A fresh process that imported nothing loads them, and traces what it loaded."""
    path = str(tmp_path / "saved.pt")
    save = f"""
import torch, generated.torch as ops
torch.save((ops.causal, ops.nn.Alibi(2), ops.nn.Alibi), {path!r})
"""
    warm_python(save)
    load = f"""
import torch
op, module, kind = torch.load({path!r}, weights_only=False)
q, k, v = torch.randn(3, 1, 2, 8, 16)
compiled = torch.compile(lambda q, k, v: op(module(q, k, v), k, v), fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(q, k, v), op(module(q, k, v), k, v))
import generated.torch as ops
print(op is ops.causal, type(module) is kind is ops.nn.Alibi)
"""
    assert warm_python(load) == "True True\n"


def test_the_first_read_of_an_op_may_be_traced() -> None:
    """torch.compile traces a function whose op, launches and operators are not imported yet."""
    code = """
import torch, generated.torch as ops
def attend(q, k, v, cu_seqlens):
    return ops.causal(q, k, v).sum() + ops.window(q[0], k[0], v[0], size=2, cu_seqlens_q=cu_seqlens).sum()
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 16))
total = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, torch.tensor([0, 1, 2]))
total.backward()
torch.testing.assert_close(total, attend(q, k, v, torch.tensor([0, 1, 2])))
print(q.grad.shape)
"""
    assert warm_python(code) == "torch.Size([1, 2, 8, 16])\n"


def test_operators_are_found_by_name() -> None:
    code = """
import torch, generated.torch
namespace = torch.ops.generated
for variant in generated.VARIANTS:
    for mode in ("", "_packed", "_segmented"):
        for name in ("fwd", "bwd"):
            assert hasattr(namespace, f"{variant}{mode}_{name}")
print(hasattr(namespace, "nothing_fwd"), namespace.causal_fwd.default)
"""
    assert warm_python(code) == "False generated.causal_fwd.default\n"


def test_an_exported_jax_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    path = str(tmp_path / "program")
    save = f"""
import jax, generated.jax as ops
q = jax.numpy.ones((1, 8, 2, 16))
exported = jax.export.export(jax.jit(lambda q: ops.causal(q, q, q)))(q)
open({path!r}, "wb").write(exported.serialize())
"""
    warm_python(save)
    load = f"""
import jax
exported = jax.export.deserialize(open({path!r}, "rb").read())
print(float(exported.call(jax.numpy.ones((1, 8, 2, 16))).sum()))
"""
    assert warm_python(load) == "256.0\n"
