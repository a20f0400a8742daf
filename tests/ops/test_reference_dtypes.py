"""The references compute in float32, or in float64 if q is float64, whatever the dtypes of a variant's own tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.rendering import importable

SPEC = """
variants:
  by_key:
    score: score / (1.0 + abs(s[kv_idx]))
    tensors: {s: {dims: [kv_idx], dtype: bfloat16, grad: true}}
  by_distance:
    mask: s[h, 2 * q_idx - kv_idx] < 0.3
    score: score - s[h, q_idx - kv_idx] * (q_idx % 3)
    tensors: {s: {dims: [h, n], dtype: float16, grad: true}}
  by_head:
    mask: causal
    decay: true
    sink: true
    score: score + s[h] * 0.3 * (kv_idx - q_idx)
    tensors: {s: {dims: [h], dtype: float16, grad: true}}
"""
VARIANTS = ("by_key", "by_distance", "by_head")
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"cu_seqlens_q": (0, 9, 16), "cu_seqlens_k": (0, 11, 20)},
}
HEADS, ROWS, KEYS, DIM = 2, 16, 20, 8


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("dtypes"), "reference_dtypes", SPEC):
        yield


def module_of(variant: str, framework: str) -> ModuleType:
    return importlib.import_module(f"reference_dtypes.{variant}.{framework}_reference")


def inputs(variant: str, mode: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v and the variant's own tensors, with values that are exact in 16 bits."""
    torch.manual_seed(0)
    lead = () if mode == "packed" else (1,)
    qkv = [torch.randn(*lead, n, HEADS, DIM) for n in (ROWS, KEYS, KEYS)]
    shapes = {"by_key": (KEYS,), "by_distance": (HEADS, 50), "by_head": (HEADS,)}
    own = {"s": torch.randn(shapes[variant])}
    if variant == "by_head":
        own |= {"g": -torch.rand(*lead, KEYS, HEADS), "sink": torch.randn(HEADS)}
    return qkv, {name: x.bfloat16().float() for name, x in own.items()}


def in_torch(variant: str, mode: str, dtype: torch.dtype) -> list[Tensor]:
    """o, lse and every gradient in float32, with own tensors of `dtype`."""
    qkv, own = inputs(variant, mode)
    leaves = [x.requires_grad_() for x in (*qkv, *(x.to(dtype) for x in own.values()))]
    module, options = (
        module_of(variant, "torch"),
        {n: torch.tensor(x, dtype=torch.int32) for n, x in MODES[mode].items()},
    )
    call = module.packed_reference if options else module.reference
    layout = {} if options else {"layout": "bshd"}
    o, lse = call(*leaves[:3], **dict(zip(own, leaves[3:], strict=True)), return_lse=True, **options, **layout)
    return [o, lse, *torch.autograd.grad(o.sin().sum() + lse[lse > -1e9].sum(), leaves)]


def in_jax(variant: str, mode: str, dtype: torch.dtype) -> list[Tensor]:
    qkv, own = inputs(variant, mode)
    module, options = module_of(variant, "jax"), {n: jnp.asarray(x, jnp.int32) for n, x in MODES[mode].items()}
    call = module.packed_reference if options else module.reference

    def loss(*leaves: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        o, lse = call(*leaves[:3], **dict(zip(own, leaves[3:], strict=True)), return_lse=True, **options)
        return jnp.sin(o).sum() + jnp.where(lse > -1e9, lse, 0.0).sum(), (o, lse)

    name = str(dtype).removeprefix("torch.")
    leaves = [*(jnp.asarray(x.numpy()) for x in qkv), *(jnp.asarray(x.numpy(), name) for x in own.values())]
    grads, results = jax.jit(jax.grad(loss, argnums=tuple(range(len(leaves))), has_aux=True))(*leaves)
    return [torch.tensor(np.asarray(x.astype(jnp.float32))) for x in (*results, *grads)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_own_tensors_are_widened_before_they_are_computed_with(framework: str, variant: str, mode: str) -> None:
    """Only the gradients of tensors that are given in 16 bits have 16 bits: each is rounded once, at the end."""
    results = in_torch if framework == "torch" else in_jax
    want, got = results(variant, mode, torch.float32), results(variant, mode, torch.bfloat16)
    for place, (x, y) in enumerate(zip(want, got, strict=True)):
        rounded = x if place < 5 else x.bfloat16().float()
        torch.testing.assert_close(y.float(), rounded, rtol=1e-6, atol=1e-6, msg=f"result {place} differs")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float64_call_computes_in_float64_with_all_tensors(variant: str) -> None:
    qkv, own = inputs(variant, "dense")
    wide = [x.double() for x in qkv]
    reference = module_of(variant, "torch").reference
    want = reference(*wide, **{name: x.double() for name, x in own.items()}, layout="bshd")
    got = reference(*wide, **{name: x.half() for name, x in own.items()}, layout="bshd")
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
