"""References on the CPU where all scores of a row are far from 0, as under a bias of -1e9 for rows of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing.golden import load_op

pytestmark = pytest.mark.covers(family="reference", framework="torch")

ROWS, KEYS, DIM = 6, 50, 16
FILLS = (-1e4, -1e6, -1e9, float(torch.finfo(torch.float32).min))


def drawn(fill: float) -> tuple[dict[str, Tensor], Tensor]:
    """q, k and v, and a bias whose last two rows have no other number than `fill`."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, ROWS, DIM, generator=generator)
    k, v = torch.randn(2, 1, 1, KEYS, DIM, generator=generator)
    bias = torch.zeros(1, 1, ROWS, KEYS)
    bias[:, :, -2:] = fill
    return {"q": q, "k": k, "v": v}, bias


def expected(given: dict[str, Tensor], bias: Tensor) -> list[Tensor]:
    """o and the gradients of q, k and v of its sum, of scores as float32 has them, and all else in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in given.items()}
    score = leaves["q"] @ leaves["k"].mT / DIM**0.5
    rounded = (score.detach().float() + bias).double()
    o = (score + (rounded - score.detach())).softmax(-1) @ leaves["v"]
    return [o.detach(), *torch.autograd.grad(o.sum(), list(leaves.values()))]


@pytest.mark.parametrize("fill", FILLS)
def test_torch(fill: float) -> None:
    given, bias = drawn(fill)
    op: Any = load_op("band_bias")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    o = op(**leaves, bias=bias, before=99, after=99)
    found = [o.detach(), *torch.autograd.grad(o.sum(), list(leaves.values()))]
    for got, want in zip(found, expected(given, bias), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fill", FILLS)
def test_jax(fill: float) -> None:
    jax = pytest.importorskip("jax")
    from generated.jax import band_bias

    given, bias = drawn(fill)

    def total(arrays: dict[str, Any]) -> Any:
        o: Any = band_bias(**arrays, bias=jax.numpy.asarray(bias.numpy()), before=99, after=99, layout="bhsd")
        return o.sum(), o

    gradients, o = jax.grad(total, has_aux=True)({name: jax.numpy.asarray(x.numpy()) for name, x in given.items()})
    found = [o, *(gradients[name] for name in given)]
    for got, want in zip(found, expected(given, bias), strict=True):
        torch.testing.assert_close(torch.tensor(jax.device_get(got)).double(), want, rtol=1e-3, atol=1e-4)
