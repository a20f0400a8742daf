"""The kernel of Hugging Face's hub that `codegen hub` makes of `generated/`, checked and loaded without `kernels`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from codegen.cli.main import main
from codegen.hub.tree import FLASH_FUNCTIONS, Kernel, tree
from codegen.util.errors import CodegenError
from generated import VARIANTS
from tests.support.fresh import python, warm_python
from tests.support.paths import ROOT

KERNEL = Kernel(name="some-attention", owner="me", version=3)
ID = re.compile(r"_some_attention_(cuda|cpu)_[0-9a-f]{10}")

LOAD = """
import importlib.util, json, pathlib, sys, torch
def load(folder, name=""):
    folder = pathlib.Path(folder)
    name = name or json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
torch.manual_seed(0)
q, k, v = (torch.randn(2, heads, 24, 16, requires_grad=True) for heads in (4, 2, 2))
"""
"""Code that imports a build by its path, under its id, as `kernels.get_local_kernel` does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "kernel"
    assert main(["hub", str(ROOT / "generated"), "--out", str(out), "--name", KERNEL.name, "--owner", "me"]) == 0
    return out


@pytest.fixture(scope="module")
def build(folder: Path) -> Path:
    return folder / "build/torch-cpu"


def test_modules_import_the_standard_library_torch_triton_and_each_other(build: Path) -> None:
    modules = {path.relative_to(build): path.read_text(encoding="utf-8") for path in build.rglob("*.py")}
    assert len(modules) > 20 * len(VARIANTS)
    imports = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    found = {
        name for text in modules.values() for name in imports.findall(re.sub(r'""".*?"""', "", text, flags=re.DOTALL))
    }
    assert found - sys.stdlib_module_names == {"torch", "triton"}
    assert not [path for path in modules if "jax" in str(path)]
    present = {path.parts[1] for path in modules if path.parts[0] == "ops"}
    assert present >= {*VARIANTS, "packing.py", "paging.py", "torch", "integrations"}


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_metadata(folder: Path, backend: str) -> None:
    build = folder / f"build/torch-{backend}"
    metadata = json.loads((build / "metadata.json").read_text(encoding="utf-8"))
    digest = metadata.pop("digest")
    assert ID.fullmatch(metadata.pop("id"))
    assert metadata == {
        "name": "some-attention",
        "version": 0,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    files = (path for path in build.rglob("*") if path.is_file() and path.name != "metadata.json")
    assert digest == {
        "algorithm": "sha256",
        "files": {
            path.relative_to(build).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in files
        },
    }


def test_build_toml_and_card(folder: Path) -> None:
    build = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))
    assert build == {
        "general": {
            "name": "some-attention",
            "version": 0,
            "edition": 5,
            "license": "apache-2.0",
            "backends": ["cuda", "cpu"],
            "hub": {"repo-id": "me/some-attention"},
        },
        "torch-noarch": {"pyext": ["py", "json"]},
    }
    card = (folder / "build/CARD.md").read_text(encoding="utf-8")
    assert 'get_kernel("me/some-attention", version=0' in card
    assert all(f"- `{name}`" in card for name in VARIANTS)


def test_tuned_tiles_go_with_the_ops(build: Path) -> None:
    tuned = [path.relative_to(ROOT / "generated") for path in (ROOT / "generated/tuned").rglob("*.json")]
    assert tuned
    assert all((build / "ops" / path).is_file() for path in tuned)


def test_ops_and_layers_compute_what_the_package_computes(build: Path) -> None:
    code = f"""{LOAD}
kernel = load({str(build)!r})
from generated import torch as ops
def same(got, want):
    assert torch.equal(got, want)
    same_grad = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)))
    assert all(torch.equal(*pair) for pair in same_grad)
same(kernel.window(q, k, v, size=5), ops.window(q, k, v, size=5))
same(torch.compile(kernel.causal, fullgraph=True, backend="eager")(q, k, v), ops.causal(q, k, v))
layer = kernel.layers.GptOss()
layer.sink = torch.ones(4)
same(layer(q, k, v), ops.gpt_oss(q, k, v, sink=torch.ones(4)))
same(kernel.layers.Document()(q, k, v, torch.zeros(2, 24, dtype=torch.int32)), ops.causal(q, k, v))
x = [t.transpose(1, 2) for t in (q, k, v)]
same(kernel.flash_attn_func(*x, causal=True).transpose(1, 2), ops.causal(q, k, v))
modules = {{"float8", "layers", "nn", "packing", "paging", "sdpa"}}
assert set(kernel.__all__) == {{*{VARIANTS!r}, *{FLASH_FUNCTIONS!r}, *modules}}
assert all(getattr(kernel, name) is not None for name in kernel.__all__)
assert getattr(torch.ops, kernel.__name__).causal_fwd
"""
    warm_python(code, imported="torch generated.torch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_run_on_a_gpu(folder: Path) -> None:
    """In 16 bits, with tuned tiles if the GPU has some, and compiled by inductor."""
    code = f"""{LOAD}
kernel = load({str(folder / "build/torch-cuda")!r})
from generated import torch as ops
q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in (q, k, v))
for name, own in (("causal", {{}}), ("window", {{"size": 5}}), ("gpt_oss", {{"sink": torch.ones(4, device="cuda")}})):
    call = {{**own, "deterministic": True}}
    results = [getattr(module, name)(q, k, v, **call) for module in (kernel, ops)]
    results.append(torch.compile(getattr(kernel, name), fullgraph=True)(q, k, v, **call))
    gradients = [torch.autograd.grad(o.float().square().sum(), (q, k, v)) for o in results]
    for o, found in zip(results[1:], gradients[1:]):
        assert torch.equal(o, results[0]) and all(map(torch.equal, found, gradients[0])), name
"""
    python(code)


def test_layers_have_no_state_of_their_own(build: Path) -> None:
    """`kernels` requires this of a layer before it puts the layer's `forward` into a module."""
    code = f"""{LOAD}
layers = load({str(build)!r}).layers
names = {{name for name in dir(torch.nn.Module)}} | {{"can_torch_compile"}}
for name in layers.__all__:
    layer = getattr(layers, name)
    assert issubclass(layer, torch.nn.Module) and layer.__init__ is torch.nn.Module.__init__
    assert set(dir(layer)) <= names, (name, set(dir(layer)) - names)
"""
    warm_python(code, imported="torch")


def test_layers_of_variants_whose_names_a_module_has_already(tmp_path: Path) -> None:
    """Two variants would have one class, a module has a `training` of its own, and a method a `self`."""
    spec, package, out = tmp_path / "names.yaml", tmp_path / "names", tmp_path / "kernel"
    spec.write_text(
        """variants:
  full_1: {}
  full1: {mask: causal}
  shifted:
    score: score * training[h] + self[b]
    tensors: {training: {dims: [h]}, self: {dims: [b]}}
""",
        encoding="utf-8",
    )
    assert main(["render", "--variants", str(spec), "--out", str(package)]) == 0
    assert main(["hub", str(package), "--out", str(out)]) == 0
    code = f"""{LOAD}
kernel = load({str(out / "build/torch-cpu")!r})
from generated import torch as ops
layers = kernel.layers
assert torch.equal(layers.Full1()(q, k, v), ops.causal(q, k, v))
assert torch.equal(layers.Full1_()(q, k, v), ops.full(q, k, v))
layer, shifts = layers.Shifted(), torch.randn(2)
layer.training_ = torch.rand(4)
want = kernel.shifted(q, k, v, training=layer.training_, self=shifts)
assert torch.equal(layer(q, k, v, shifts), want) and not torch.equal(want, ops.full(q, k, v))
"""
    warm_python(code, imported="torch generated.torch")


def test_two_builds_in_one_process_and_the_folder_of_its_name(folder: Path) -> None:
    builds = folder / "build"
    code = f"""{LOAD}
first, second = load({str(builds / "torch-cpu")!r}), load({str(builds / "torch-cuda")!r})
again = load({str(builds / "torch-cuda/some_attention")!r}, "again")
assert first.causal is not second.causal and again.causal is second.causal
assert torch.equal(first.causal(q, k, v), second.causal(q, k, v))
assert getattr(torch.ops, first.__name__).causal_fwd is not getattr(torch.ops, second.__name__).causal_fwd
assert not {{"jax", "generated", "codegen"}} & sys.modules.keys()
"""
    warm_python(code, imported="torch")


def test_an_equal_package_gives_the_same_id_and_another_one_another(tmp_path: Path) -> None:
    entry = {"doc": "All keys.", "tensors": {}, "scalars": {}, "sink": False, "decay": False, "dropout": False}
    manifest = {"variants": {"full": entry}, "files": {"__init__.py": "", "_runtime/core/lazy.py": ""}}
    (tmp_path / "_runtime/core").mkdir(parents=True)
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest), encoding="utf-8")
    (tmp_path / "__init__.py").write_text("VARIANTS = ()\n", encoding="utf-8")
    (tmp_path / "_runtime/core/lazy.py").write_text("lazy = 1\n", encoding="utf-8")
    first, again = (tree(tmp_path, KERNEL) for _ in range(2))
    (tmp_path / "_runtime/core/lazy.py").write_text("lazy = 2\n", encoding="utf-8")
    changed = tree(tmp_path, KERNEL)
    ids = [json.loads(files["build/torch-cpu/metadata.json"])["id"] for files in (first, again, changed)]
    assert first == again
    assert ids[0] == ids[1] != ids[2]


def test_the_package_itself_is_not_written_into(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", str(ROOT / "generated"), "--out", str(ROOT / "generated")]) == 2
    assert "--out: expected a folder beside the package" in capsys.readouterr().err


def test_what_is_no_package_and_taken_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match=r"expected a rendered package, which has a MANIFEST\.json"):
        tree(tmp_path, KERNEL)
    (tmp_path / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "MANIFEST.json").write_text(
        '{"variants": {"layers": {}}, "files": {"__init__.py": ""}}', encoding="utf-8"
    )
    with pytest.raises(CodegenError, match=r"variants\.layers: a kernel of the hub has another thing of that name"):
        tree(tmp_path, KERNEL)
