"""`generated.jax_nn.dot_product_attention` against that of `jax.nn`."""

from __future__ import annotations

import doctest
import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from jax import Array

from generated import jax as ops
from generated import jax_nn
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.mask_parts import mask_parts
from generated.jax_nn import attention_fn, dot_product_attention
from tests.support.nn_inputs import B, H, K, N, S, T, assert_close, drawn, normal
from tests.support.rendering import importable

ours: Callable[..., Any] = dot_product_attention
theirs: Callable[..., Any] = jax.nn.dot_product_attention


def keys_seen(
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    **_: Any,
) -> np.ndarray:
    """`[B, T]`: how many keys each query may attend to, by the documentation of jax.nn."""
    t, s = np.arange(T)[:, None], np.arange(S)
    keep = np.ones((B, T, S), bool)
    if is_causal:
        keep &= s <= t
    if local_window_size is not None:
        pair = isinstance(local_window_size, tuple)
        left, right = local_window_size if pair else (local_window_size, local_window_size)
        keep &= (t - left <= s) & (s <= t + right)
    if query_seq_lengths is not None:
        keep &= t < np.asarray(query_seq_lengths)[:, None, None]
    if key_value_seq_lengths is not None:
        keep &= s < np.asarray(key_value_seq_lengths)[:, None, None]
    counts: np.ndarray = keep.sum(2)
    return counts


QUERY_LENGTHS, KEY_LENGTHS = np.array([13, 7, 0], np.int32), np.array([17, 4, 30], np.int32)
LENGTHS: dict[str, dict[str, Any]] = {
    "none": {},
    "queries": {"query_seq_lengths": QUERY_LENGTHS},
    "keys": {"key_value_seq_lengths": KEY_LENGTHS},
    "both": {"query_seq_lengths": QUERY_LENGTHS, "key_value_seq_lengths": KEY_LENGTHS},
}
WINDOWS = (None, 0, 3, (4, 0), (0, 2), (2, 5), (100, 1), (2**30, 2**30))
MASKS = [
    pytest.param(window, lengths, id=f"{window}-{name}")
    for window in WINDOWS
    for name, lengths in LENGTHS.items()
    if window is None or name in ("none", "both")
]


def check_drop_in(q: Array, k: Array, v: Array, **options: Any) -> None:
    """Output, residual and gradients equal those of jax.nn, except for queries that see no key."""
    seen = jnp.asarray(keys_seen(**options)[: q.shape[0], : q.shape[1]] > 0)
    weights = normal(4, *q.shape) * seen[:, :, None, None]

    def results(attend: Callable[..., Any]) -> Any:
        def loss(q: Array, k: Array, v: Array) -> Any:
            o, residual = attend(q, k, v, return_residual=True, **options)
            return (o * weights).sum(), (o, residual)

        (_, (o, residual)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return o, residual, gradients

    o, residual, gradients = results(ours)
    want, want_residual, want_gradients = results(theirs)
    unseen = ~seen[:, :, None]
    assert not np.asarray(o)[~np.asarray(seen)].any()
    assert_close(residual, jnp.where(unseen, -jnp.inf, want_residual))
    assert_close(o, jnp.where(unseen[..., None], 0, want))
    assert_close(gradients, want_gradients)
    assert_close(ours(q, k, v, **options), o)


@pytest.mark.covers(framework="jax")
@pytest.mark.parametrize(("window", "lengths"), MASKS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_masks_are_those_of_jax_nn(is_causal: bool, window: Any, lengths: dict[str, Any]) -> None:
    check_drop_in(*drawn(), is_causal=is_causal, local_window_size=window, **lengths)


@pytest.mark.parametrize(("query_len", "key_len"), [(13, 9), (1, 17), (9, 9)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_shapes(kv_heads: int, query_len: int, key_len: int) -> None:
    arrays = drawn(query_len=query_len, key_len=key_len, kv_heads=kv_heads)
    check_drop_in(*arrays, is_causal=True, scale=0.3)


def test_queries_past_the_last_key_of_a_window() -> None:
    """Of 13 queries, query 12 sees none of nine keys in a window of two: o is 0, in jax.nn the mean of all values."""
    q, k, v = drawn(key_len=9)
    o, residual = ours(q, k, v, local_window_size=(2, 0), return_residual=True)
    want = theirs(q, k, v, local_window_size=(2, 0))
    assert_close(o[:, :11], want[:, :11])
    assert not o[:, 11:].any()
    assert np.isneginf(residual[:, 11:]).all()
    assert_close(want[:, 12], jnp.repeat(v.mean(1), N // K, 1))


def test_a_window_without_an_end() -> None:
    """A size of 2**40 is given to `ours` only, because jax.nn adds positions to it in 32 bits."""
    q, k, v = drawn()
    assert_close(ours(q, k, v, local_window_size=(2**40, 0)), theirs(q, k, v, is_causal=True))
    assert_close(ours(q, k, v, local_window_size=2**40), theirs(q, k, v))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (2, 1)}], ids=str)
def test_arrays_without_a_batch(options: dict[str, Any]) -> None:
    q, k, v = (x[0] for x in drawn())
    got = ours(q, k, v, return_residual=True, **options)
    assert_close(got, theirs(q, k, v, return_residual=True, **options))
    assert [x.shape for x in got] == [(T, N, H), (T, N)]
    lengths = {"query_seq_lengths": np.array([7], np.int32), "key_value_seq_lengths": np.array([5], np.int32)}
    assert_close(
        ours(q, k, v, **options, **lengths)[:4],
        theirs(q, k, v, **options, **lengths)[:4],
    )
    # A q with a batch axis of one may be given together with k and v without a batch axis.
    assert_close(ours(q[None], k, v, **options), got[0][None], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: Any) -> None:
    arrays = drawn(dtype=dtype)
    options: dict[str, Any] = {"is_causal": True, "return_residual": True}
    # Both round the result once, and jax.nn rounds its probabilities too: an error of 2 eps for elements around 1.
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    want = theirs(*arrays, **options)
    assert_close(ours(*arrays, **options), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [2, np.float32(0.5), np.array(0.5), jnp.array([0.5])], ids=lambda x: type(x).__name__)
def test_scales(scale: Any) -> None:
    q, k, v = drawn()
    # Only jax.nn multiplies by the array of one axis without a reshape, which promotes its rank.
    with jax.numpy_rank_promotion("allow"):
        want = theirs(q, k, v, scale=scale)
    assert_close(ours(q, k, v, scale=scale), want)


def test_numpy_arrays_and_traced_lengths() -> None:
    q, k, v = drawn()
    options: dict[str, Any] = {"is_causal": True, **LENGTHS["keys"]}
    want = ours(q, k, v, **options)
    assert_close(ours(*(np.asarray(x) for x in (q, k, v)), **options), want, rtol=0, atol=0)

    @jax.jit
    def traced(q: Array, lengths: Array) -> Any:
        return ours(q, k, v, is_causal=True, key_value_seq_lengths=lengths)

    assert_close(traced(q, jnp.asarray(KEY_LENGTHS)), want)
    over_rows = jax.vmap(lambda q, k, v: ours(q, k, v, is_causal=True))
    assert_close(over_rows(q, k, v), ours(q, k, v, is_causal=True))


def test_64_bit_numbers_elsewhere() -> None:
    """With x64 enabled, JAX converts Python's ints to int64."""
    options: dict[str, Any] = {"local_window_size": (3, np.int64(1)), "return_residual": True, **LENGTHS["both"]}
    q, k, v = drawn()
    want = ours(q, k, v, **options)
    with jax.enable_x64(True):
        assert_close(ours(q, k, v, **options), want)


def test_values_of_another_depth() -> None:
    """jax.nn does not accept a v with another head dim."""
    q, k, v = drawn()
    wide = jnp.concatenate([v, 2 * v], -1)
    o = ours(q, k, wide, is_causal=True)
    assert_close(o, jnp.concatenate([x := ours(q, k, v, is_causal=True), 2 * x], -1))


def test_the_residual_has_no_gradient() -> None:
    q, k, v = drawn()
    gradient = jax.grad(lambda q: jnp.sum(ours(q, k, v, return_residual=True)[1]))(q)
    assert not gradient.any()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cudnn": ({"implementation": "cudnn"}, "implementation: expected None, .*jax.nn.dot_product.* got 'cudnn'"),
    "negative window": ({"local_window_size": (3, -1)}, r"local_window_size: expected an int or .*, got \(3, -1\)"),
    "long window": ({"local_window_size": (1, 2, 3)}, r"local_window_size: expected .*, got \(1, 2, 3\)"),
    "no window": ({"local_window_size": 2.0}, r"local_window_size: expected .*, got 2\.0"),
    "a flag": ({"local_window_size": True}, "local_window_size: expected .*, got True"),
    "lengths": (
        {"key_value_seq_lengths": [1, 2]},
        r"key_value_seq_lengths: expected an integer array \[3\], got int32",
    ),
    "kind": (
        {"query_seq_lengths": np.ones(3)},
        r"query_seq_lengths: expected an integer array \[3\], got float64 \[3\]",
    ),
    "scale": ({"scale": math.inf}, "scale: expected a finite number or None, got inf"),
    "ragged": (
        {"query_seq_lengths": [[1], [2, 3]]},
        r"query_seq_lengths: expected an integer array \[B\], got list",
    ),
    "no array": ({"key": None}, r"key: expected an array \[B, S, K, H\] or \[S, K, H\], got NoneType"),
    "a word": ({"is_causal": "no"}, "is_causal: expected True or False, got 'no'"),
    "flags": (
        {"return_residual": np.array([True, False])},
        "return_residual: expected True or False, got ndarray of bool \\[2\\]",
    ),
    "axes": ({"query": jnp.ones((T, H))}, r"query: expected shape \[B, T, N, H\] or \[T, N, H\], got \[13, 16\]"),
    "heads": ({"query": jnp.ones((B, T, 3, H))}, "q: expected a head count that is a multiple of k's 2, got 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, message = BAD[name]
    q, k, v = drawn()
    with pytest.raises(ArgumentError, match=message):
        ours(**{"query": q, "key": k, "value": v, **options})


def test_a_traced_flag_is_refused() -> None:
    q, k, v = drawn()
    with pytest.raises(ArgumentError, match="is_causal: expected True or False, known while tracing, got a traced"):
        jax.jit(lambda flag: ours(q, k, v, is_causal=flag))(True)
    assert_close(ours(q, k, v, is_causal=np.bool_(True)), ours(q, k, v, is_causal=True))


def test_a_traced_scale_is_refused() -> None:
    with pytest.raises(ArgumentError, match="scale: expected a Python number, known while tracing: multiply q"):
        jax.jit(lambda scale: ours(*drawn(), scale=scale))(0.5)


# ----------------------------------------------------------------------------------------------------- another package


def variant_of_message(call: Callable[[], Any]) -> str:
    """The entry of a spec that the error message proposes."""
    with pytest.raises(ArgumentError) as caught:
        call()
    found = re.search(r"`(\w+: \{.*\})`", str(caught.value))
    assert found
    return found[1]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A package of another spec: the entries that errors propose, a `causal` that also caps scores, and no `window`."""
    array = np.ones((1, 1, 2, 2), bool)
    q, k, v = drawn()
    entries = [
        variant_of_message(lambda: attention_fn(ops.full)(q, k, v, mask=array)),
        variant_of_message(lambda: attention_fn(ops.full)(q, k, v, bias=array)),
        "causal: {mask: causal, score: softcap(30.0)}",
        "band: {mask: q_idx - kv_idx < 5 and q_idx >= kv_idx}",
        "full: {doc: All.}",
    ]
    spec = "variants:\n" + "".join(f"  {entry}\n" for entry in entries)
    with importable(tmp_path_factory.mktemp("package"), "nn_of_another_spec", spec) as package:
        return importlib.import_module(f"{package.name}.jax_nn")


def test_the_variants_that_errors_propose(package: ModuleType) -> None:
    q, k, v = drawn()
    mask = normal(5, B, T, S) > 0
    want = theirs(q, k, v, mask=mask[:, None])
    assert_close(package.ops.masked(q, k, v, seen=mask), want)
    bias = normal(6, B, N, T, S)

    def gradient(attend: Callable[..., Any]) -> Array:
        found: Array = jax.grad(lambda bias: jnp.sum(attend(bias) * q))(bias)
        return found

    assert_close(
        gradient(lambda bias: package.ops.biased(q, k, v, bias=bias)),
        gradient(lambda bias: theirs(q, k, v, bias)),
    )


def test_a_package_without_the_variant(package: ModuleType) -> None:
    q, k, v = drawn()
    assert_close(package.dot_product_attention(q, k, v), theirs(q, k, v))
    # ValueError, because this package has another class ArgumentError.
    with pytest.raises(
        ValueError, match=r"is_causal: expected the variant `causal: .*` in .*, got another one of that"
    ):
        package.dot_product_attention(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"local_window_size: expected the variant `window: .* again, got no such var"):
        package.dot_product_attention(q, k, v, local_window_size=(3, 0))


@pytest.mark.parametrize(("name", "options"), [("full", {}), ("causal", {"is_causal": True})])
def test_a_missing_variant_is_named(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    others = {other: entry for other, entry in jax_nn._variants().items() if other != name}
    monkeypatch.setattr(jax_nn, "_variants", lambda: others)
    with pytest.raises(ArgumentError, match=f"is_causal: expected the variant `{name}: .*: add it and render again"):
        ours(*drawn(), **options)


@pytest.mark.parametrize(
    ("mask", "parts"),
    [
        ("", set()),
        ("kv_idx <= q_idx", {"causal"}),
        ("window(size) and (causal)", {"causal", "window(size)"}),
        ("q_idx >= kv_idx and q_idx - kv_idx<size", {"causal", "window(size)"}),
        ("causal or prefix(n)", {"causal or prefix(n)"}),
        ("causal and prefix(n) if x else y", {"causal and prefix(n) if x else y"}),
        ("not causal", {"not causal"}),
    ],
)
def test_parts_of_a_mask(mask: str, parts: set[str]) -> None:
    assert mask_parts(mask) == parts


def test_importing_it_imports_no_flax() -> None:
    code = "import sys, generated.jax_nn; print(sorted({'flax', 'torch', 'triton', 'optax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_examples_of_its_docstrings() -> None:
    assert doctest.testmod(jax_nn, raise_on_error=True).attempted > 0
