"""Gradients at kinks of a score, such as at tables of zeros: kernels and references agree with torch's functions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cases import DEVICE, tiles
from tests.support.rendering import importable

PACKAGE = "kinks"
LENGTH, HEADS, DIM = 20, 2, 16

SPEC = """
variants:
  relu_table: {score: "score + relu(w[h])", tensors: {w: {dims: [h], grad: true}}}
  relu_score: {score: "relu(score) + 0.1 * w[kv_idx]", tensors: {w: {dims: [n], grad: true}}}
  abs_score: {score: "abs(score) * w[q_idx] + w[q_idx]", tensors: {w: {dims: [n], grad: true}}}
  max_tables: {score: "score * max(w[h], u[h])", tensors: {w: {dims: [h], grad: true}, u: {dims: [h], grad: true}}}
  min_number: {score: "min(score, 0) + 0.1 * w[kv_idx]", tensors: {w: {dims: [n], grad: true}}}
  roots: {score: "0.1 * sqrt(relu(score)) + sqrt(where(score > 1, score - 1, 0.0))"}
  zeroed_roots:
    score: 0.1 * sqrt(1 - clamp(score, -1, 1) ** 2) - 0.1 * sqrt(0.5 - min(score, 0.5)) + exp(-1 / relu(score))
  powers: {score: "0.1 * clamp(score, 0.0, 8.0) ** 1.5 + 0.1 * max(score, 0.0) ** 1.7"}
  power_table: {score: "score + w[h] ** 2.5", tensors: {w: {dims: [h], grad: true}}}
  clamp_ends: {score: "clamp(score, 0, 5) + clamp(score, -5, 0)"}
  clamp_tables:
    score: score + clamp(w[kv_idx], u[q_idx], 2.0)
    tensors: {w: {dims: [n], grad: true}, u: {dims: [n], grad: true}}
"""

# The score of each variant by torch's own functions, from the scaled product and the tensors.
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "relu_table": lambda s, w: s + torch.relu(w[:, None, None]),
    "relu_score": lambda s, w: torch.relu(s) + 0.1 * w,
    "abs_score": lambda s, w: torch.abs(s) * w[:, None] + w[:, None],
    "max_tables": lambda s, w, u: s * torch.maximum(w, u)[:, None, None],
    "min_number": lambda s, w: torch.minimum(s, torch.zeros_like(s)) + 0.1 * w,
    "roots": lambda s: 0.1 * torch.sqrt(torch.relu(s)) + torch.sqrt(torch.where(s > 1, s - 1, 0.0)),
    "zeroed_roots": lambda s: (
        0.1 * torch.sqrt(1 - torch.clamp(s, -1, 1) ** 2)
        - 0.1 * torch.sqrt(0.5 - torch.minimum(s, torch.full_like(s, 0.5)))
        + torch.exp(-1 / torch.relu(s))
    ),
    "powers": lambda s: 0.1 * torch.clamp(s, 0, 8) ** 1.5 + 0.1 * torch.maximum(s, torch.zeros_like(s)) ** 1.7,
    "power_table": lambda s, w: s + w[:, None, None] ** 2.5,
    "clamp_ends": lambda s: torch.clamp(s, 0, 5) + torch.clamp(s, -5, 0),
    "clamp_tables": lambda s, w, u: s + torch.clamp(w, u[:, None], torch.full_like(w, 2.0)),
}


PER_HEAD = ("relu_table", "max_tables", "power_table")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("kinks"), PACKAGE, SPEC) as folder:
        yield folder


def arguments(variant: str) -> dict[str, Tensor]:
    """Half of the rows of q, and so their scores, are zeros. Tables hold few numbers, which many pairs share."""
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM)
    q[:, :, ::2] = 0.0
    table = torch.ones(HEADS) if variant == "max_tables" else torch.zeros(HEADS)
    longer = torch.arange(LENGTH) % 3 - 1.0
    own = ("w", "u")[: FORMULAS[variant].__code__.co_argcount - 1]
    found = {"q": q, "k": k, "v": v, **dict.fromkeys(own, table if variant in PER_HEAD else longer)}
    return {name: x.clone().to(DEVICE).requires_grad_() for name, x in found.items()}


def expected(variant: str, given: dict[str, Tensor]) -> Tensor:
    q, k, v, *own = given.values()
    score = FORMULAS[variant](q @ k.mT / math.sqrt(DIM), *own)
    return torch.softmax(score, -1) @ v


def gradients(o: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    do = torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o).to(o.dtype)
    return dict(zip(given, torch.autograd.grad(o, list(given.values()), do), strict=True))


def check(got: dict[str, Any], variant: str, given: dict[str, Tensor]) -> None:
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    want = gradients(expected(variant, exact), exact)
    for name, x in want.items():
        np.testing.assert_allclose(np.asarray(got[name]), x.cpu().numpy(), atol=2e-5, err_msg=f"{variant}: d{name}")


@pytest.mark.parametrize("variant", FORMULAS)
def test_kernels_have_torchs_gradients_at_kinks(variant: str) -> None:
    given = arguments(variant)
    op = getattr(importlib.import_module(f"{PACKAGE}.torch"), variant)
    found = gradients(call(op, given, config=tiles(16, 16)), given)
    check({name: x.cpu() for name, x in found.items()}, variant, given)


def call(op: Callable[..., Any], given: dict[str, Any], **options: Any) -> Any:
    own = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    return op(given["q"], given["k"], given["v"], **own, **options)


@pytest.mark.parametrize("variant", FORMULAS)
def test_torch_references_have_torchs_gradients_at_kinks(variant: str) -> None:
    given = {name: x.detach().cpu().requires_grad_() for name, x in arguments(variant).items()}
    reference = importlib.import_module(f"{PACKAGE}.{variant}.torch_reference").reference
    check(gradients(call(reference, given), given), variant, given)


@pytest.mark.parametrize("variant", FORMULAS)
def test_jax_references_have_torchs_gradients_at_kinks(variant: str) -> None:
    jax = pytest.importorskip("jax")
    given = {name: x.detach().cpu() for name, x in arguments(variant).items()}
    reference = importlib.import_module(f"{PACKAGE}.{variant}.jax_reference").reference
    o, pull = jax.vjp(lambda x: call(reference, x, layout="bhsd"), {n: jax.numpy.asarray(x) for n, x in given.items()})
    do = jax.numpy.linspace(-1, 1, o.size, dtype=o.dtype).reshape(o.shape)
    check(pull(do)[0], variant, {name: x.requires_grad_() for name, x in given.items()})
