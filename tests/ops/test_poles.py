"""Gradients of scores with poles at pairs that the mask leaves out, or where a choice takes something else."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.rendering import importable

LENGTH, HEADS, DIM = 12, 2, 8

SPEC = """
variants:
  masked_log:
    mask: causal
    score: score * log(1.0 + q_idx - kv_idx) + w[h] * sqrt(q_idx - kv_idx)
    tensors: &w {w: {dims: [h], grad: true}}
  left_out: {score: "where(q_idx > kv_idx, score + w[h] / (q_idx - kv_idx), -inf)", tensors: *w}
  choice_of_scores:
    score: "score * w[h] if score <= 0 else (sqrt(score) if score > 0.1 else w[h] * log(score))"
    tensors: *w
  roots:
    score: >-
      sqrt(max(score, 0)) - w[h] * sqrt(max(-0.5, abs(min(score, 0)))) + sqrt(clamp(score, 0, 0.3)) + sqrt(relu(score))
    tensors: *w
  choice_of_distances: {score: "score + where(kv_idx != q_idx, w[h] / abs(kv_idx - q_idx), w[h])", tensors: *w}
"""

ROWS, KEYS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
DISTANCE = (ROWS - KEYS).double()
NEVER = float("-inf")


def choice_of_scores(s: Tensor, w: Tensor) -> Tensor:
    positive, large = torch.where(s > 0, s, 1.0), torch.where(s > 0.1, s, 1.0)
    return torch.where(s <= 0, s * w, torch.where(s > 0.1, large.sqrt(), w * positive.log()))


def roots(s: Tensor, w: Tensor) -> Tensor:
    up, down = torch.where(s > 0, s, 1.0).sqrt(), torch.where(s < 0, -s, 1.0).sqrt()
    middle = torch.where((s > 0) & (s < 0.3), s, 0.3).sqrt()
    return torch.where(s > 0, 2 * up + middle, 0.0) - w * torch.where(s < 0, down, 0.0)


# The score of each variant, by functions that have no pole at any pair.
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_log": lambda s, w: torch.where(
        DISTANCE >= 0, s * (1 + DISTANCE.clamp(0)).log() + w * DISTANCE.clamp(0).sqrt(), NEVER
    ),
    "left_out": lambda s, w: torch.where(DISTANCE > 0, s + w / DISTANCE.clamp(1), NEVER),
    "roots": roots,
    "choice_of_scores": choice_of_scores,
    "choice_of_distances": lambda s, w: s + torch.where(DISTANCE != 0, w / DISTANCE.abs().clamp(1), w),
}


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("poles"), "poles", SPEC):
        yield


def arguments() -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM)
    return {"q": q, "k": k, "v": v, "w": torch.rand(HEADS)}


def expected(variant: str) -> list[Tensor]:
    q, k, v, w = given = [x.double().requires_grad_() for x in arguments().values()]
    score = FORMULAS[variant](q @ k.mT / math.sqrt(DIM), w[:, None, None])
    keyless = (score == NEVER).all(-1, keepdim=True)
    probs = torch.softmax(torch.where(keyless, 0.0, score), -1) * ~keyless
    return list(torch.autograd.grad((probs @ v).square().sum(), given))


def check(got: Any, variant: str) -> None:
    for name, x, wanted in zip(arguments(), got, expected(variant), strict=True):
        # A few sums of float32, whose terms near the pole of the logarithm are up to ten.
        np.testing.assert_allclose(np.asarray(x), wanted.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("variant", FORMULAS)
def test_torch(variant: str) -> None:
    given = {name: x.requires_grad_() for name, x in arguments().items()}
    op = importlib.import_module(f"poles.{variant}.torch_reference").reference
    check(torch.autograd.grad(op(**given).square().sum(), list(given.values())), variant)


@pytest.mark.parametrize("variant", FORMULAS)
def test_jax(variant: str) -> None:
    given = [x.numpy() for x in arguments().values()]
    op = importlib.import_module(f"poles.{variant}.jax_reference").reference

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        o: jax.Array = op(q, k, v, w=w, layout="bhsd")
        return (o**2).sum()

    check(jax.grad(loss, argnums=(0, 1, 2, 3))(*given), variant)
