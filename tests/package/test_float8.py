"""`generated.float8`: what `quantize` restores, its scales by layout, and the rotation of `hadamard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import ArgumentError
from generated.float8 import hadamard, quantize
from generated.torch import full

HALF_STEP = 2**-4
"""float8_e4m3fn has three binary digits after the point: rounding is off by half of 2**-3."""

LARGEST, LEAST = 448.0, 2**-9

LIST: Any = [1.0]


def assert_restored(x: Tensor, x8: Tensor, scale: Tensor) -> None:
    """`scale` has the shape of x, or broadcasts to it."""
    assert x8.dtype == torch.float8_e4m3fn
    assert x8.shape == x.shape
    bound = torch.maximum(x.abs() * HALF_STEP, scale * LEAST / 2)
    assert ((x8.double() * scale.double() - x.double()).abs() <= bound.double() * (1 + 1e-5)).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_have_the_scales_of_their_largest_elements(layout: str) -> None:
    x = torch.randn(2, 3, 50, 16) * torch.tensor([1.0, 100.0, 1e-4])[:, None, None]
    given = x if layout == "bhsd" else x.transpose(1, 2)
    x8, scale = quantize(given, layout=layout)
    assert scale.shape == (2, 3)
    torch.testing.assert_close(scale, x.abs().amax((2, 3)) / LARGEST)
    each = scale[:, :, None, None] if layout == "bhsd" else scale[:, None, :, None]
    assert_restored(given, x8, each)


def test_packed_sequences_have_scales_of_their_own() -> None:
    lengths, cu_seqlens = [5, 0, 30], torch.tensor([0, 5, 5, 35], dtype=torch.int32)
    x = torch.randn(35, 2, 16, dtype=torch.bfloat16)
    x8, scale = quantize(x, cu_seqlens=cu_seqlens)
    assert scale.shape == (3, 2)
    assert_restored(x, x8, scale.repeat_interleave(torch.tensor(lengths), 0)[:, :, None])
    alone, own = quantize(x[5:].transpose(0, 1)[None])
    assert torch.equal(own[0], scale[2])
    assert torch.equal(alone[0].transpose(0, 1).float(), x8[5:].float())


@pytest.mark.parametrize("shape", [(1, 2, 0, 16), (2, 2, 3, 16)], ids=str)
def test_zeros_stay_zeros(shape: tuple[int, ...]) -> None:
    x8, scale = quantize(torch.zeros(shape))
    assert (x8.float() == 0).all()
    assert (scale > 0).all()


def test_results_have_no_gradient() -> None:
    assert not any(found.requires_grad for found in quantize(torch.randn(1, 1, 4, 8, requires_grad=True)))


@pytest.mark.parametrize("columns", [1, 16, 256])
def test_rotations_keep_scores(columns: int) -> None:
    turn = hadamard(columns, dtype=torch.float64, seed=3)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(columns, dtype=torch.float64))
    assert not torch.equal(turn, hadamard(columns, dtype=torch.float64, seed=4)) or columns == 1


def test_a_rotation_makes_outliers_cost_less() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 128, dtype=torch.float64)
    q[..., 7] += 30 * (torch.rand(q.shape[:3]) < 0.02)
    wanted = torch.softmax(q @ k.mT / 128**0.5, -1) @ v
    turn, errors = hadamard(128, dtype=torch.float64), []
    for matrix in (torch.eye(128, dtype=torch.float64), turn):
        scaled = [quantize(x) for x in (q @ matrix, k @ matrix, v)]
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = scaled
        o: Any = full(q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        errors.append(float((o.double() - wanted).square().mean().sqrt()))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(LIST), "quantize: x: expected floating-point [B, H, S, D], got list"),
        (
            lambda: quantize(torch.ones(2, 2, 2, 2).int()),
            "quantize: x: expected floating-point [B, H, S, D], got torch.int32",
        ),
        (lambda: quantize(torch.ones(2, 2, 2)), "quantize: x: expected floating-point [B, H, S, D], got [2, 2, 2]"),
        (
            lambda: quantize(torch.ones(1, 1, 1, 1), layout="sbhd"),
            "quantize: layout: expected 'bhsd' or 'bshd', got 'sbhd'",
        ),
        (
            lambda: quantize(torch.ones(4, 1, 1), cu_seqlens=torch.tensor([0.0, 4.0])),
            "quantize: cu_seqlens: expected int32 or int64 [n + 1] on cpu, got torch.float32 [2] on cpu",
        ),
        (lambda: hadamard(48), "hadamard: columns: expected a power of two, got 48"),
        (lambda: hadamard(0), "hadamard: columns: expected"),
    ],
    ids=["list", "integers", "dims", "layout", "cu_seqlens", "48", "0"],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert message in str(raised.value)
