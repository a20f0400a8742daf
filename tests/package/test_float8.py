"""`generated.float8`: the values of `quantize` times its scales, scales by layout, and the rotation of `hadamard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing.golden_jax import array, tensor
from generated._runtime.core.checks import ArgumentError
from generated.float8 import hadamard, quantize
from generated.torch import full

HALF_STEP = 2**-4
"""float8_e4m3fn has three binary digits after the point: rounding is off by half of 2**-3."""

LARGEST, LEAST = 448.0, 2**-9

LIST: Any = [1.0]


def assert_restored(x: Tensor, x8: Tensor, scale: Tensor) -> None:
    """Check that x8 times `scale` is x up to rounding; `scale` has the shape of x, or broadcasts to it."""
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


@pytest.mark.parametrize("scale", [-1.0, torch.tensor(-1.0), torch.tensor([1.0, -1.0]), torch.tensor([[1.0, -1.0]])])
def test_ops_refuse_negative_scales(scale: Any) -> None:
    x8, given = quantize(torch.randn(1, 2, 4, 8))
    with pytest.raises(
        ValueError, match=r"^full: q_scale: expected (a finite number|finite elements) of at least 0(\.0)?, got -1\.0"
    ):
        full(x8, x8, x8, q_scale=scale, k_scale=given, v_scale=given)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("make", [float, torch.tensor, lambda x: torch.tensor([1.0, x])])
def test_ops_refuse_scales_that_are_not_finite(make: Any, bad: float) -> None:
    x8, given = quantize(torch.randn(1, 2, 4, 8))
    with pytest.raises(
        ValueError, match=rf"^full: q_scale: expected (a finite number|finite elements) of at least 0(\.0)?, got {bad}"
    ):
        full(x8, x8, x8, q_scale=make(bad), k_scale=given, v_scale=given)


@pytest.mark.parametrize("begins", [None, torch.tensor([0, 4])], ids=["dense", "packed"])
def test_ops_refuse_the_portable_family(begins: Tensor | None) -> None:
    """As on a GPU, where only Hopper's kernels compute in 8 bits."""
    x = torch.randn(1, 2, 4, 16) if begins is None else torch.randn(4, 2, 16)
    x8, given = quantize(x, cu_seqlens=begins)
    scales = {"q_scale": given, "k_scale": given, "v_scale": given, "cu_seqlens_q": begins}
    with pytest.raises(ArgumentError, match=r"^full: family: expected None or 'hopper' .*, got 'portable'"):
        full(x8, x8, x8, family="portable", **scales)


@pytest.mark.parametrize("columns", [1, 16, 256])
def test_rotations_keep_scores(columns: int) -> None:
    turn = hadamard(columns, dtype=torch.float64, seed=3)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(columns, dtype=torch.float64))
    assert not torch.equal(turn, hadamard(columns, dtype=torch.float64, seed=4)) or columns == 1


def test_a_rotation_does_not_depend_on_the_default_device() -> None:
    want, like = hadamard(64, seed=1), torch.zeros(1)
    with torch.device("meta"):
        assert torch.equal(hadamard(64, seed=1, like=like), want)


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
        (
            lambda: quantize(LIST),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, H, S, D], got list",
        ),
        (
            lambda: quantize(torch.ones(2, 2, 2, 2).int()),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, H, S, D], got torch.int32",
        ),
        (
            lambda: quantize(torch.ones(2, 2, 2)),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, H, S, D], got [2, 2, 2]",
        ),
        (
            lambda: quantize(np.ones((1, 1, 1, 1))),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, H, S, D], got float64",
        ),
        (
            lambda: quantize(jnp.ones((2, 2, 2))),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, S, H, D], got [2, 2, 2]",
        ),
        (
            lambda: quantize(jnp.ones((2, 2, 2), jnp.int8)),
            "quantize: x: expected a floating-point torch.Tensor or jax.Array [B, S, H, D], got int8",
        ),
        (
            lambda: quantize(jnp.ones((4, 1, 1)), cu_seqlens=torch.tensor([0, 4])),
            "quantize: cu_seqlens: expected an int32 or int64 jax.Array [n + 1], got Tensor",
        ),
        (
            lambda: quantize(jnp.ones((4, 1, 1)), cu_seqlens=jnp.asarray([[0, 4]])),
            "quantize: cu_seqlens: expected an int32 or int64 jax.Array [n + 1], got int32 [1, 2]",
        ),
        (
            lambda: quantize(torch.ones(1, 1, 1, 1), layout="sbhd"),
            "quantize: layout: expected 'bhsd' or 'bshd', got 'sbhd'",
        ),
        (
            lambda: quantize(torch.ones(4, 1, 1), cu_seqlens=torch.tensor([0, 3])),
            "quantize: cu_seqlens: expected",
        ),
        (lambda: hadamard(8, like=torch.ones(1, dtype=torch.int64)), "hadamard: dtype: expected a dtype of floats"),
        (lambda: hadamard(8, like=jnp.ones(1, jnp.int32)), "hadamard: dtype: expected a dtype of floats, got int32"),
        (
            lambda: quantize(torch.ones(4, 1, 1), cu_seqlens=torch.tensor([0.0, 4.0])),
            "quantize: cu_seqlens: expected int32 or int64 [n + 1] on cpu, got torch.float32 [2] on cpu",
        ),
        (
            lambda: quantize(jnp.ones((4, 1, 1)), cu_seqlens=jnp.asarray([0, 3])),
            "quantize: cu_seqlens: expected a last value of 4, the rows of x, got 3",
        ),
        (lambda: quantize(torch.ones(1, 1, 1, 1), layout=""), "quantize: layout: expected 'bhsd' or 'bshd', got ''"),
        (lambda: quantize(torch.ones(1, 1, 1, 0)), "quantize: x: expected at least one column, got [1, 1, 1, 0]"),
        (lambda: hadamard(8, dtype="float32"), "hadamard: dtype: expected a torch.dtype of floats"),
        (
            lambda: hadamard(8, like=jnp.ones(1), dtype=torch.float32),
            "hadamard: dtype: expected a dtype of floats that",
        ),
        (lambda: hadamard(8, like=jnp.ones(1), device="cpu"), "hadamard: device: expected None, a jax.Device or a"),
        (lambda: hadamard(48), "hadamard: columns: expected a power of two, got 48"),
        (lambda: hadamard(0), "hadamard: columns: expected"),
        (lambda: hadamard(8, seed=-1), "hadamard: seed: expected an int of at least 0, got -1"),
        (lambda: hadamard(8, like=8), "hadamard: like: expected None or a torch.Tensor or jax.Array, got int"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert message in str(raised.value)


# --------------------------------------------------------------------------------------------------------- JAX


def assert_equal(found: tuple[jax.Array, jax.Array], wanted: tuple[Tensor, Tensor]) -> None:
    """Compare the values of 8 bits, and the scales."""
    assert found[0].dtype == jnp.float8_e4m3fn
    assert torch.equal(tensor(found[0]).view(torch.uint8), wanted[0].contiguous().view(torch.uint8))
    assert torch.equal(tensor(found[1]), wanted[1])


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, whose quotients are rounded in every way, and a head of zeros."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    x[..., 0, :] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arrays_become_what_tensors_do(dtype: torch.dtype, jitted: bool) -> None:
    quantized = jax.jit(quantize, static_argnames="layout") if jitted else quantize
    x = spread(2, 300, 3, 16, dtype=dtype)
    assert_equal(quantized(array(x)), quantize(x, layout="bshd"))
    rows = x.transpose(1, 2).contiguous()
    assert_equal(quantized(array(rows), layout="bhsd"), quantize(rows))
    begins, empty = torch.tensor([0, 100, 100, 300], dtype=torch.int32), torch.zeros(1, 0, 3, 16)
    assert_equal(quantized(array(x[0]), cu_seqlens=array(begins)), quantize(x[0], cu_seqlens=begins))
    assert_equal(quantized(array(empty)), quantize(empty, layout="bshd"))


def test_arrays_have_no_gradient() -> None:
    x = jnp.ones((1, 4, 1, 8))
    gradient = jax.grad(lambda x: quantize(x)[1].sum() + quantize(x)[0].astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(gradient, 0 * x)


@pytest.mark.parametrize("seed", [0, 7, 2**30])
def test_rotations_are_those_of_torch(seed: int) -> None:
    turn = hadamard(64, seed=seed)
    assert torch.equal(tensor(hadamard(64, seed=seed, like=jnp.ones(1))), turn)
    half = hadamard(64, seed=seed, like=jnp.ones(1, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert torch.equal(tensor(half), turn.bfloat16())
    assert torch.equal(hadamard(64, seed=seed, like=torch.ones(1, dtype=torch.bfloat16)), turn.bfloat16())
