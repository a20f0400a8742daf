"""Masks and biases that are arrays: `generated.jax_nn.dot_product_attention` against that of `jax.nn`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax import Array

from generated import jax_nn
from generated._runtime.core.checks import ArgumentError
from generated.integrations.entries import Attention
from generated.integrations.variants import find
from tests.support.rendering import importable

B, T, S, N, K, H = 3, 13, 17, 4, 2, 16
CLOSE: Any = {"rtol": 2e-5, "atol": 2e-5}
"""float32: sums of at most 17 terms around 1 and exps of scores around 1, rounded in another order; measured 2e-6."""

ours: Callable[..., Any] = jax_nn.dot_product_attention
theirs: Callable[..., Any] = jax.nn.dot_product_attention


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def drawn(dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    return normal(1, B, T, N, H, dtype=dtype), normal(2, B, S, K, H, dtype=dtype), normal(3, B, S, K, H, dtype=dtype)


def coins(*shape: int) -> Array:
    """True in seven of ten."""
    return jnp.asarray(np.random.default_rng(4).random(shape) < 0.7)


def seen(mask: Any, **options: Any) -> np.ndarray:
    """`[B, T, N]`: whether a query sees any key, by the documentation of jax.nn."""
    t, s = np.arange(T)[:, None], np.arange(S)
    keep: Any = np.ones((B, N, T, S), bool)
    keep &= True if mask is None else np.broadcast_to(mask, keep.shape)
    keep &= s <= t if options.get("is_causal") else True
    if (window := options.get("local_window_size")) is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        keep &= (t - left <= s) & (s <= t + right)
    for name, index in (("query_seq_lengths", t), ("key_value_seq_lengths", s)):
        if name in options:
            keep &= index < options[name][:, None, None, None]
    found: np.ndarray = keep.any(3).transpose(0, 2, 1)
    return found


def check(bias: Array | None, mask: Array | None, **options: Any) -> None:
    """Outputs, residuals and all gradients equal those of jax.nn. Queries that see no key give zeros instead."""
    q, k, v = drawn()
    sees = jnp.asarray(seen(mask, **options))
    weights = normal(5, B, T, N, H) * sees[..., None]

    def results(attend: Callable[..., Any]) -> Any:
        def loss(q: Array, k: Array, v: Array, bias: Array | None) -> Any:
            o, residual = attend(q, k, v, bias, mask, return_residual=True, **options)
            return (o * weights).sum(), (o, residual)

        by = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        (_, found), gradients = jax.jit(jax.value_and_grad(loss, by, has_aux=True))(q, k, v, bias)
        return *found, gradients

    (o, residual, gradients), (want, want_residual, want_gradients) = results(ours), results(theirs)
    np.testing.assert_allclose(o, jnp.where(sees[..., None], want, 0), **CLOSE)
    np.testing.assert_allclose(residual, jnp.where(sees, want_residual, -jnp.inf), **CLOSE)
    for got, expected in zip(gradients, want_gradients, strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(got, expected, **CLOSE)


SHAPES = [(B, N, T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, T, 1), (N, T, S), (T, S), (1, 1, 1, 1)]
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "causal window": {"local_window_size": 4, "is_causal": True},
    "lengths": {
        "query_seq_lengths": np.array([13, 7, 0], np.int32),
        "key_value_seq_lengths": np.array([17, 4, 30], np.int32),
    },
    "all": {
        "is_causal": True,
        "local_window_size": (5, 1),
        "query_seq_lengths": np.array([13, 7, 4], np.int32),
        "key_value_seq_lengths": np.array([17, 4, 9], np.int32),
    },
}


@pytest.mark.covers(framework="jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_that_broadcast(shape: tuple[int, ...]) -> None:
    q, k, v = drawn()
    bias, mask = normal(6, *shape), coins(*shape)
    sees = jnp.asarray(seen(mask))[..., None]
    np.testing.assert_allclose(ours(q, k, v, bias), theirs(q, k, v, bias), **CLOSE)
    np.testing.assert_allclose(ours(q, k, v, mask=mask), jnp.where(sees, theirs(q, k, v, mask=mask), 0), **CLOSE)


@pytest.mark.parametrize(
    ("kinds", "name"),
    [*(("both", name) for name in OPTIONS), ("mask", "alone"), ("mask", "all"), ("bias", "all")],
)
def test_masks_and_biases_beside_other_arguments(kinds: str, name: str) -> None:
    bias, mask = normal(6, 1, N, T, S), coins(B, 1, T, S)
    check(None if kinds == "mask" else bias, None if kinds == "bias" else mask, **OPTIONS[name])


def test_a_query_that_a_mask_hides_all_keys_from_gives_zeros() -> None:
    mask = coins(B, N, T, S).at[1, 2, 3].set(False).at[0, :, 5].set(False)
    assert not seen(mask).all()
    check(None, mask)


def test_biases_of_minus_infinity() -> None:
    """Masks that are written into a bias use -inf or the smallest number of the dtype."""
    mask = coins(B, 1, T, S).at[..., 0].set(True)
    for low in (-jnp.inf, jnp.finfo(jnp.float32).min):
        check(jnp.where(mask, normal(6, B, N, T, S), low), None, is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_dtypes_of_a_bias(dtype: Any) -> None:
    q, k, v = drawn()
    bias = (normal(6, 1, N, T, S) * 3).astype(dtype)
    np.testing.assert_allclose(ours(q, k, v, bias, coins(T, S)), theirs(q, k, v, bias, coins(1, 1, T, S)), **CLOSE)
    if dtype != jnp.int32:
        gradients = [
            jax.grad(lambda b, attend=attend: (attend(q, k, v, b) * q).sum())(bias) for attend in (ours, theirs)
        ]
        assert gradients[0].dtype == gradients[1].dtype == dtype
        # Both round to the dtype: 2 eps for elements up to 1.
        tolerance = 2 * float(jnp.finfo(dtype).eps)
        got, want = (np.asarray(x, np.float32) for x in gradients)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(S,), (B, 1, 1, S), (N, T, S)], ids=str)
def test_the_gradient_of_an_expanded_bias_is_rounded_once(shape: tuple[int, ...]) -> None:
    """Before it is rounded to the dtype of the bias, it is summed in float32 over the axes that are expanded."""
    q, k, v = drawn()
    bias, weights = normal(6, *shape).astype(jnp.bfloat16), normal(5, B, T, N, H)

    def gradient(attend: Callable[..., Any], bias: Array) -> Array:
        found: Array = jax.grad(lambda x: (attend(q, k, v, x) * weights).sum())(bias)
        return found

    want = gradient(theirs, bias.reshape(*[1] * (4 - bias.ndim), *shape).astype(jnp.float32)).reshape(shape)
    got = gradient(ours, bias).astype(jnp.float32)
    # Half an eps for the rounding, and CLOSE for sums of float32.
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(jnp.bfloat16).eps) / 2, atol=CLOSE["atol"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: Any) -> None:
    q, k, v = drawn(dtype)
    bias, mask = normal(6, 1, N, T, S), coins(B, 1, T, S)
    got, want = ours(q, k, v, bias, mask), theirs(q, k, v, bias, mask)
    assert got.dtype == want.dtype == dtype
    # Both round the result once, and jax.nn rounds its probabilities too: an error of 2 eps for elements around 1.
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=tolerance, atol=tolerance
    )


def test_arrays_without_a_batch_and_over_vmap() -> None:
    q, k, v = drawn()
    bias, mask = normal(6, B, N, T, S), coins(B, N, T, S)
    want = theirs(q, k, v, bias, mask)
    np.testing.assert_allclose(ours(q[0], k[0], v[0], bias[0], mask[0]), want[0], **CLOSE)
    np.testing.assert_allclose(jax.vmap(ours)(q, k, v, bias, mask), want, **CLOSE)
    alone = jax.vmap(lambda q, k, v, mask: ours(q, k, v, mask=mask))(q, k, v, mask)
    np.testing.assert_allclose(alone, theirs(q, k, v, mask=mask), **CLOSE)


def test_where_jax_has_64_bits() -> None:
    q, k, v = drawn()
    bias, mask = normal(6, 1, N, T, S), coins(B, 1, T, S)
    want = ours(q, k, v, bias, mask)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(ours(q, k, v, jnp.asarray(bias, jnp.float64), mask), want)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"mask": jnp.ones((1, 1, T, S))}, r"mask: expected a bool array, .*, got float32 \[1, 1, 13, 17\]"),
    "mask": (
        {"mask": jnp.ones((2, 1, T, S), bool)},
        r"mask: expected a shape that broadcasts to \[B, N, T, S\] = \[3, 4, 13, 17\], got \[2, 1, 13, 17\]",
    ),
    "bias": ({"bias": jnp.ones((1, 2, T, S))}, r"bias: expected a shape that broadcasts to .*, got \[1, 2, 13, 17\]"),
    "axes": ({"bias": jnp.ones((1, 1, 1, T, S))}, r"bias: expected a shape that .*, got \[1, 1, 1, 13, 17\]"),
    "words": ({"mask": "causal"}, "mask: expected a bool array, .*, got str"),
    "object": ({"bias": object()}, "bias: expected an array of real numbers, got object"),
    "complex": ({"bias": jnp.ones((T, S), complex)}, r"bias: expected an array of real numbers, got complex64 \[13"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ArgumentError, match=f"dot_product_attention: {message}"):
        ours(*drawn(), **options)


def test_variants_of_arrays_are_found_by_what_they_compute() -> None:
    assert find(Attention(after=0, mask=True)).name == "band_mask"
    assert find(Attention(before=3, after=2, mask=True)).mask == "keep"
    assert find(Attention(bias=True)).bias == "bias"


def test_a_package_without_the_variant_names_the_entry_and_one_with_it_is_served(tmp_path: Path) -> None:
    q, k, v = drawn()
    bias, mask = normal(6, 1, N, T, S), coins(B, 1, T, S)
    spec = """variants:
      by_pairs: {mask: "seen[b, h, q_idx, kv_idx]", tensors: {seen: {dims: [b, h, q_idx, kv_idx], dtype: bool}}}
      full: {doc: All.}
    """
    with importable(tmp_path, "nn_of_masks", spec) as package:
        other = importlib.import_module(f"{package.name}.jax_nn")
        np.testing.assert_allclose(other.dot_product_attention(q, k, v, mask=mask), theirs(q, k, v, mask=mask), **CLOSE)
        with pytest.raises(
            ValueError, match=r"(?s)mask: expected None, as .*causal_mask:.*keep\[b, h, q_idx, kv_idx\]"
        ):
            other.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        with pytest.raises(ValueError, match=r"(?s)bias: expected None, as .* a bias per pair.* got an array \[1, 4"):
            other.dot_product_attention(q, k, v, bias, is_causal=True)
