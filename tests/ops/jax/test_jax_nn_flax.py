"""Ops as the `attention_fn` of Flax's modules, against the attention of Flax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array

from examples.demo import CPU_SIZE
from examples.train_jax import train
from generated import jax as ops
from generated import jax_nn
from generated._runtime.core.checks import ArgumentError
from generated.jax_nn import attention_fn
from tests.support.nn_inputs import B, H, K, N, S, T, assert_close, drawn, normal

FEATURES = 64


def linen_results(attend: Callable[..., Any], x: Array, y: Array | None, mask: Array | None, **options: Any) -> Any:
    """Outputs and the gradients of inputs and parameters."""
    module = linen.MultiHeadDotProductAttention(num_heads=N, attention_fn=attend, **options)
    variables = module.init(jax.random.key(0), x, y)

    def loss(variables: Any, x: Array) -> Any:
        o: Any = module.apply(variables, x, y, mask=mask)
        return (o.astype(jnp.float32) * normal(7, *o.shape)).sum(), o

    (_, o), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)
    return o, gradients


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)], ids=str)
def test_linen(lead: tuple[int, ...]) -> None:
    x = normal(1, *lead, T, FEATURES)
    mask = linen.make_causal_mask(jnp.ones((*lead, T)))
    want = linen_results(linen.dot_product_attention, x, None, mask)
    assert_close(linen_results(attention_fn(ops.causal), x, None, None), want, rtol=1e-4, atol=1e-4)


def test_linen_between_two_sequences() -> None:
    x, y = normal(1, B, T, FEATURES), normal(2, B, S, FEATURES)
    want = linen_results(linen.dot_product_attention, x, y, None)
    assert_close(linen_results(attention_fn(ops.full), x, y, None), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kv_heads", "lead"), [(N, ()), (K, (3,)), (1, (2, 3))], ids=str)
def test_nnx(kv_heads: int, lead: tuple[int, ...]) -> None:
    x = normal(1, *lead, T, FEATURES)

    def results(attend: Callable[..., Any], is_causal: bool) -> Any:
        rngs = nnx.Rngs(0)
        module = nnx.MultiHeadAttention(
            N, FEATURES, num_kv_heads=kv_heads, attention_fn=attend, decode=False, rngs=rngs
        )

        def loss(module: nnx.MultiHeadAttention, x: Array) -> Any:
            o = module(x, is_causal=is_causal)
            return (o * normal(7, *o.shape)).sum(), o

        (_, o), gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(module, x)
        return o, gradients[1], nnx.to_pure_dict(gradients[0])

    want = results(nnx.dot_product_attention, True)
    for is_causal in (False, True):
        assert_close(results(attention_fn(ops.causal), is_causal), want, rtol=1e-4, atol=1e-4)


def test_dtypes() -> None:
    """Attention computes in the dtype of the module, or, if it has none, in the dtype that its inputs promote to."""
    q, k, v = drawn()
    mixed = attention_fn(ops.full)(q.astype(jnp.bfloat16), k, v)
    assert_close(mixed, ops.full(q.astype(jnp.bfloat16).astype(jnp.float32), k, v), rtol=0, atol=0)
    assert attention_fn(ops.full)(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    x = normal(1, B, T, FEATURES)
    mask = linen.make_causal_mask(jnp.ones((B, T)))
    got, _ = linen_results(attention_fn(ops.causal), x, None, None, dtype=jnp.bfloat16)
    want, _ = linen_results(linen.dot_product_attention, x, None, mask, dtype=jnp.bfloat16)
    # Flax rounds scores and probabilities of its own attention to bfloat16: errors of eps 2**-8 in each of the terms.
    assert_close(got, want, rtol=0, atol=0.03)


def test_own_tensors_and_scalars() -> None:
    q, k, v = drawn(key_len=T)
    lead = (1, B)
    folded = [x[None] for x in (q, k, v)]
    doc = jnp.asarray(np.arange(T) // 4 + np.zeros((B, 1)), jnp.int32)
    got = attention_fn(ops.document, doc=doc)(*folded)
    assert got.shape == (*lead, T, N, H)
    assert_close(got[0], ops.document(q, k, v, doc=doc), rtol=0, atol=0)
    got = attention_fn(ops.window, size=3, scale=0.5, q_offset=1)(q, k, v)
    assert_close(got, ops.window(q, k, v, size=3, scale=0.5, q_offset=1), rtol=0, atol=0)

    @jax.grad
    def gradient(slope: Array, attend: Callable[..., Array]) -> Array:
        return (attend(slope) * q).sum()

    slope = normal(8, N)
    got = gradient(slope, jax.tree_util.Partial(lambda slope: attention_fn(ops.alibi, slope=slope)(q, k, v)))
    want = gradient(slope, jax.tree_util.Partial(lambda slope: ops.alibi(q, k, v, slope=slope)))
    assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_dropout(impl: str) -> None:
    """Flax gives the rate and the key; the seed comes from the key, of every kind that JAX has."""
    q, k, v = drawn(key_len=T)
    attend = attention_fn(ops.causal_dropout)
    whole = ops.causal(q, k, v)
    assert_close(attend(q, k, v, dropout_rate=0.5, deterministic=True), whole)
    assert_close(attend(q, k, v, dropout_rate=0.0, dropout_rng=jax.random.key(1)), whole)
    keys = jax.random.split(jax.random.key(1, impl=impl), 400)
    first, again, other = (attend(q, k, v, dropout_rate=0.5, dropout_rng=keys[i]) for i in (0, 0, 1))
    assert_close(first, again, rtol=0, atol=0)
    assert (first != other).any()
    # Row 0 sees one key only. It is kept and doubled, or dropped: o of row 0 is twice v or zero.
    assert set(np.unique(np.asarray(first[:, 0] / jnp.repeat(v[:, 0], N // K, 1)).round(4))) <= {0, 2}
    mean = jax.jit(
        lambda keys: jax.lax.map(lambda key: attend(q, k, v, dropout_rate=0.5, dropout_rng=key), keys).mean(0)
    )
    # The standard deviation of an element is at most the largest |v|, that of a mean of 400 draws a 20th of it. The
    # tolerance is five standard deviations of the mean.
    assert_close(mean(keys), whole, rtol=0, atol=5 * float(jnp.abs(v).max()) / math.sqrt(400))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_dropout_in_a_module(library: str) -> None:
    x = normal(1, B, T, FEATURES)
    attend = attention_fn(ops.causal_dropout)
    if library == "linen":
        module = linen.MultiHeadDotProductAttention(num_heads=N, dropout_rate=0.5, attention_fn=attend)
        variables = module.init(jax.random.key(0), x, deterministic=True)

        def apply(key: int, deterministic: bool) -> Any:
            return module.apply(variables, x, deterministic=deterministic, rngs={"dropout": jax.random.key(key)})
    else:

        def apply(key: int, deterministic: bool) -> Any:
            rngs = nnx.Rngs(0, dropout=key)
            module = nnx.MultiHeadAttention(N, FEATURES, dropout_rate=0.5, attention_fn=attend, decode=False, rngs=rngs)
            return module(x, deterministic=deterministic)

    assert_close(apply(1, False), apply(1, False), rtol=0, atol=0)
    assert (apply(1, False) != apply(2, False)).any()
    assert_close(apply(1, True), apply(2, True), rtol=0, atol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no array": ({"value": None}, r"value: expected an array \[..., length, heads, depth\], got NoneType"),
    "a word": ({"is_causal": "no"}, "is_causal: expected True or False, got 'no'"),
    "mask": (
        {"mask": jnp.ones((B, 1, T, T), bool)},
        "mask: expected None: .* or is what full has anyhow.*bool \\[3, 1",
    ),
    "bias": (
        {"bias": jnp.ones((B, 1, T, T))},
        "bias: expected None: a bias is written in the spec, as a variant of its",
    ),
    "dropout": ({"dropout_rate": 0.1}, "dropout_rate: expected 0, or deterministic=True: .*`dropout: true`"),
    "weights": ({"module": linen.Dense(1)}, "module: expected None, without sow_weights: .*, got Dense"),
    "products": ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general: expected None: .* own products"),
    "quantised": ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum: expected None"),
    "causal": ({"is_causal": True}, "is_causal: expected False: who attends to whom is the op's own mask"),
    "keys": ({"key": jnp.ones((2, T, N, H))}, r"key: expected shape \[3, length, heads, depth\], got \[2, 13, 4, 16\]"),
    "axes": ({"query": jnp.ones((N, H))}, r"query: expected shape \[length, heads, depth\], got \[4, 16\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_op_cannot_do_for_flax_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    q, k, v = drawn(key_len=T)
    with pytest.raises(ArgumentError, match=rf"attention_fn\(full\): {message}"):
        attention_fn(ops.full)(**{"query": q, "key": k, "value": v, **options})


@pytest.mark.parametrize(("op", "got"), [(None, "NoneType"), ("causal", "'causal'"), (len, "len")])
def test_only_ops_are_taken(op: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=f"^attention_fn: op: expected one of the ops for JAX, got {got}$"):
        attention_fn(op)


def test_dropout_needs_a_key() -> None:
    q, k, v = drawn(key_len=T)
    with pytest.raises(ArgumentError, match=r"dropout_rng: expected a key of jax.random beside dropout_rate, got None"):
        attention_fn(ops.causal_dropout)(q, k, v, dropout_rate=0.1)


@pytest.mark.parametrize("argument", ["slope", "layout", "dropout_p", "q", "cu_seqlens_q"])
def test_only_arguments_of_the_op_are_fixed(argument: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"attention_fn\(causal\): {argument}: expected an argument of causal to fix"
    ):
        attention_fn(ops.causal, **{argument: 1})


def test_modules_pass_on_what_they_are_asked_for() -> None:
    """Flax's filters of arguments do not hide these arguments from the attention function, which refuses them."""
    x = normal(1, B, T, FEATURES)
    module = linen.MultiHeadDotProductAttention(num_heads=N, attention_fn=attention_fn(ops.full))
    variables = module.init(jax.random.key(0), x)
    with pytest.raises(ArgumentError, match=r"attention_fn\(full\): module"):
        module.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    with pytest.raises(ArgumentError, match=r"attention_fn\(full\): mask"):
        module.apply(variables, x, mask=linen.make_causal_mask(jnp.ones((B, T))))
    other = nnx.MultiHeadAttention(N, FEATURES, attention_fn=attention_fn(ops.full), decode=True, rngs=nnx.Rngs(0))
    other.init_cache((B, T, FEATURES))
    with pytest.raises(ArgumentError, match=r"attention_fn\(full\): mask"):
        other(x[:, :1])


@pytest.mark.parametrize("name", ["causal", "window", "document", "gpt_oss", "forgetting"])
def test_ops_that_are_causal(name: str) -> None:
    assert jax_nn._is_causal(getattr(ops, name))


@pytest.mark.parametrize("op", [ops.full, ops.prefix_lm, ops.natten, lambda q, k, v: q], ids=lambda op: op.__name__)
def test_ops_that_are_not_causal(op: Callable[..., Any]) -> None:
    assert not jax_nn._is_causal(op)


def test_training_with_either_attention() -> None:
    size = replace(CPU_SIZE, layers=1, seq=32, batch=4, steps=6)
    reports: list[tuple[int, float]] = []
    run = train(size, attention_fn(ops.causal), lambda *report: reports.append(report), 3)
    flax = train(size, nnx.dot_product_attention, lambda *_: None, 3)
    np.testing.assert_allclose(run.losses, flax.losses, atol=1e-4)
    assert run.held_out == pytest.approx(flax.held_out, abs=1e-4)
    # The loss of an untrained model is log(256) up to an error of its random logits. The text differs between Pythons.
    assert run.losses[0] == pytest.approx(math.log(256), abs=1.0)
    assert run.losses[-1] < run.losses[0]
    assert [step for step, _ in reports] == [3, 6]
    assert reports[0][1] == pytest.approx(sum(run.losses[:3]) / 3, abs=1e-5)
