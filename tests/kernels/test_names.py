"""Variants, tensors and scalars may have any names: names that generated code uses give the results of plain names."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from tests.support.cases import DEVICE, tiles
from tests.support.rendering import importable

PACKAGE = "used_names"
LENGTH, HEADS, DIM = 24, 2, 16

# Variant, its entry, and the names in place of A, B and C.
CASES = {
    "reference": (
        '{mask: causal, score: "score + A[h] * (kv_idx - q_idx)", tensors: {A: {dims: [h], grad: true}}}',
        ("span",),
    ),
    "max": ('{mask: "causal or A > kv_idx", scalars: {A: {type: int, example: 9}}}', ("prefix_len",)),
    "int": ('{mask: "A[b, q_idx] == A[b, kv_idx]", tensors: {A: {dims: [b, kv_idx], dtype: int32}}}', ("tile",)),
    "Tensor": (
        '{score: "score * A[h] + B[q_idx] * C[kv_idx]", tensors: '
        "{A: {dims: [h], grad: true}, B: {dims: [n], grad: true}, C: {dims: [n], grad: true}}}",
        ("heads", "values", "block"),
    ),
    "apply": (
        '{score: "score + A[h, q_idx - kv_idx] * B", tensors: {A: {dims: [h, n], grad: true}}, '
        "scalars: {B: {type: float, example: 0.5}}}",
        ("x_ptr", "x_len"),
    ),
    "Attention": (
        '{mask: "q_idx - kv_idx < A", score: "score * B", scalars: {A: {type: int, example: 7}, '
        "B: {type: float, example: 0.5}}, decay: true, sink: true}",
        ("lse", "len"),
    ),
    "getattr": (
        '{mask: "kv_idx >= C", score: "score + A[h] * B[h]", tensors: '
        "{A: {dims: [h], grad: true}, B: {dims: [h], grad: true}}, scalars: {C: {type: int, example: 2}}}",
        ("w", "dw", "dw_heads"),
    ),
    "Any": (
        '{mask: "A[kv_idx] > 0.5 or causal", score: "softcap(B) * C[q_idx] * C[q_idx]", tensors: '
        "{A: {dims: [n]}, C: {dims: [q_idx], grad: true}}, scalars: {B: {type: float, example: 5.0}}}",
        ("torch", "self", "jnp"),
    ),
    "keywords": (
        '{score: "score + A[h] * B[h] * C", tensors: {A: {dims: [h], grad: true}, B: {dims: [h]}}, '
        "scalars: {C: {type: float, example: 0.5}}}",
        ("term", "own_term", "kwargs"),
    ),
    "import_module": ('{mask: "kv_idx < A[b] - B", tensors: {A: {dims: [b], dtype: int32}}, '
        "scalars: {B: {type: int, example: 3}}}", ("row_offset", "tokens")),
}  # fmt: skip


def names_of(variant: str, *, used: bool) -> dict[str, str]:
    """The names in place of A, B and C: names that generated code uses, or plain ones."""
    names = CASES[variant][1]
    return {letter: name if used else f"plain_{letter.lower()}" for letter, name in zip("ABC", names, strict=False)}


def spec_text() -> str:
    """Each variant under its own names, and under plain ones."""
    lines = ["variants:"]
    for variant, (entry, _) in CASES.items():
        for used in (True, False):
            given = names_of(variant, used=used)
            text = entry
            for letter, name in given.items():
                text = re.sub(rf"\b{letter}\b", name, text)
            lines.append(f"  {variant if used else 'plain_' + variant}: {text}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("used"), PACKAGE, spec_text()) as folder:
        yield folder


def own_arguments(variant: str, mode: str, *, used: bool) -> dict[str, Any]:
    """Keyword arguments, with equal values under both kinds of names."""
    entry = golden.load_manifest(PACKAGE)[variant if used else f"plain_{variant}"]
    generator = torch.Generator().manual_seed(3)
    packed = mode == "packed"
    found: dict[str, Any] = {}
    for name in names_of(variant, used=used).values():
        if name in entry["scalars"]:
            found[name] = entry["scalar_examples"][name]
            continue
        tensor = entry["tensors"][name]
        tokens = any(dim in ("q_idx", "kv_idx") for dim in tensor["dims"])
        dims = [dim for dim in tensor["dims"] if not (packed and tokens and dim == "b")]
        sizes = [{"h": HEADS, "b": 2 if packed else 1}.get(dim, LENGTH) for dim in dims]
        if "int" in tensor["dtype"]:
            x = torch.randint(4, 8, sizes, generator=generator).sort(-1).values * (1 if tokens else 3)
        else:
            x = torch.rand(sizes, generator=generator)
        found[name] = x.to(DEVICE, getattr(torch, tensor["dtype"])).requires_grad_(tensor["grad"])
    if entry["decay"]:
        g = -0.1 * torch.rand((LENGTH, HEADS) if packed else (1, LENGTH, HEADS), generator=generator)
        found["g"] = g.to(DEVICE).requires_grad_()
    if entry["sink"]:
        found["sink"] = torch.rand(HEADS, generator=generator).to(DEVICE).requires_grad_()
    return found


def call_of(variant: str, mode: str = "dense", *, used: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and options of a call."""
    generator = torch.Generator().manual_seed(4)
    shape = (LENGTH, HEADS, DIM) if mode == "packed" else (1, HEADS, LENGTH, DIM)
    qkv = {name: torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for name in "qkv"}
    options: dict[str, Any] = {}
    if mode == "packed":
        cu = torch.tensor([0, 9, LENGTH], dtype=torch.int32, device=DEVICE)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    elif mode == "segmented":
        options = {"q_segment_ids": (torch.arange(LENGTH, device=DEVICE)[None] // 14).int()}
    return {**qkv, **own_arguments(variant, mode, used=used)}, options


def on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a reference."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    return arguments | {name: x.detach().cpu().requires_grad_(x.requires_grad) for name, x in tensors.items()}


def evaluated(op: Callable[..., Any], arguments: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    q, k, v = (arguments[name] for name in "qkv")
    rest = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
    o, lse = op(q, k, v, return_lse=True, **rest, **options)
    leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    return [o, lse, *torch.autograd.grad(o.square().sum() + lse.sin().sum(), leaves)]


MODES = [
    *((variant, "dense") for variant in CASES),
    *((variant, mode) for variant in ("int", "apply", "Attention") for mode in ("packed", "segmented")),
]


@pytest.mark.parametrize(("variant", "mode"), MODES)
def test_kernels_compute_the_same_under_used_names(variant: str, mode: str) -> None:
    found = []
    for used in (True, False):
        op = golden.load_op(variant if used else f"plain_{variant}", PACKAGE)
        arguments, options = call_of(variant, mode, used=used)
        found.append(evaluated(op, arguments, {**options, "config": tiles(16, 16)}))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", CASES)
def test_torch_references_compute_the_same_under_used_names(variant: str) -> None:
    found = []
    for used in (True, False):
        reference = golden.load_reference(variant if used else f"plain_{variant}", package=PACKAGE)
        found.append(evaluated(reference, on_cpu(call_of(variant, used=used)[0]), {}))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", CASES)
def test_jax_computes_the_same_under_used_names(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    for module in ("jax.call", "jax.primitive"):
        monkeypatch.setattr(f"{PACKAGE}._runtime.{module}.INTERPRET", False, raising=False)
    op = getattr(importlib.import_module(f"{PACKAGE}.jax"), variant)
    arguments, _ = call_of(variant)
    want = evaluated(golden.load_reference(variant, package=PACKAGE), on_cpu(arguments), {})
    arrays = {n: jax.numpy.asarray(x.detach().cpu()) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    trained = {n: x for n, x in arrays.items() if isinstance(arguments[n], Tensor) and arguments[n].requires_grad}

    def outputs(leaves: dict[str, Any]) -> Any:
        given = {**arrays, **leaves}
        q, k, v = (given.pop(name) for name in "qkv")
        o, lse = op(q, k, v, layout="bhsd", return_lse=True, **given)
        return (o**2).sum() + jax.numpy.sin(lse).sum(), (o, lse)

    (_, (o, lse)), gradients = jax.value_and_grad(outputs, has_aux=True)(trained)
    for got, x in zip([o, lse, *(gradients[name] for name in trained)], want, strict=True):
        np.testing.assert_allclose(np.asarray(got), x.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", CASES)
def test_ops_have_the_arguments_of_the_spec(variant: str) -> None:
    op = golden.load_op(variant, PACKAGE)
    entry = golden.load_manifest(PACKAGE)[variant]
    assert {*entry["tensors"], *entry["scalars"]} <= {*inspect.signature(op).parameters}
    assert pickle.loads(pickle.dumps(op)) is op
    documented = re.findall(r"^        (\w+):", op.__doc__, re.MULTILINE)
    assert {*entry["tensors"], *entry["scalars"]} <= {*documented}


@pytest.mark.parametrize(("variant", "argument"), [("reference", "span"), ("max", "prefix_len")])
def test_errors_name_the_argument_of_the_spec(variant: str, argument: str) -> None:
    op = golden.load_op(variant, PACKAGE)
    arguments, _ = call_of(variant)
    with pytest.raises(ValueError, match=rf"^{variant}: {argument}: "):
        op(arguments["q"], arguments["k"], arguments["v"])


def test_schedules_take_the_arguments_of_the_spec() -> None:
    op: Any = golden.load_op("int", PACKAGE)
    arguments, _ = call_of("int")
    q, k, v, tile = arguments.values()
    schedule = op.schedule(q, k, v, tile=tile, config=tiles(16, 16))
    got = op(q, k, v, tile=tile, schedule=schedule, config=tiles(16, 16))
    torch.testing.assert_close(got, op(q, k, v, tile=tile, config=tiles(16, 16)), rtol=0, atol=0)
