"""`generated.integrations.equinox` compared with Equinox's own attention, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

eqx = pytest.importorskip("equinox", reason="equinox is in none of the extras: no other test needs it")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import Array  # noqa: E402

from generated.integrations.equinox import Attention  # noqa: E402
from generated.jax import alibi, causal, document  # noqa: E402

SIZE, HEADS, LENGTH = 64, 4, 24
SLOPE = 2.0 ** -jnp.arange(1.0, 1.0 + HEADS)


def inputs(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(1), (*shape, SIZE))


def test_it_computes_what_equinox_computes_with_the_same_weights() -> None:
    layer = Attention(causal, SIZE, heads=HEADS, key=jax.random.key(0))
    peer = eqx.nn.MultiheadAttention(HEADS, SIZE, key=jax.random.key(2))
    names = ("query_proj", "key_proj", "value_proj", "output_proj")
    linear = (layer.query, layer.key, layer.value, layer.output)
    peer = eqx.tree_at(lambda net: [getattr(net, name) for name in names], peer, linear)
    x, mask = inputs(LENGTH), jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    assert jnp.allclose(layer(x), peer(x, x, x, mask=mask), atol=1e-5)


def test_a_batch_a_vmap_and_single_sequences_agree() -> None:
    layer = Attention(alibi, SIZE, heads=HEADS, kv_heads=2, tensors={"slope": SLOPE}, key=jax.random.key(0))
    x = inputs(2, LENGTH)
    whole = layer(x)
    assert whole.shape == x.shape
    assert jnp.allclose(whole, jnp.stack([layer(row) for row in x]), atol=1e-5)
    assert jnp.allclose(whole, jax.vmap(layer)(x), atol=1e-5)


def test_packed_rows_and_documents_agree() -> None:
    layer = Attention(causal, SIZE, heads=HEADS, key=jax.random.key(0))
    by_document = Attention(document, SIZE, heads=HEADS, key=jax.random.key(0))
    x = inputs(LENGTH)
    doc = (jnp.arange(LENGTH) >= 10).astype(jnp.int32)[None]
    packed = layer(x, cu_seqlens_q=jnp.array([0, 10, LENGTH], jnp.int32))
    assert jnp.allclose(packed, by_document(x, doc=doc), atol=1e-5)


def test_tensors_are_trained_with_the_weights() -> None:
    layer = Attention(alibi, SIZE, heads=HEADS, tensors={"slope": SLOPE}, key=jax.random.key(0))
    x = inputs(2, LENGTH)

    def loss(net: Attention) -> Array:
        return (net(x) ** 2).sum()

    grads = eqx.filter_jit(eqx.filter_grad(loss))(layer)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    step = 1e-2
    moved = [eqx.tree_at(lambda net: net.tensors["slope"], layer, SLOPE.at[0].add(sign * step)) for sign in (1, -1)]
    losses = [float(loss(net)) for net in moved]
    assert float(grads.tensors["slope"][0]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=2e-2)


def test_keys_of_another_sequence() -> None:
    layer = Attention(causal, SIZE, heads=HEADS, head_dim=32, use_bias=True, key=jax.random.key(0))
    assert layer(inputs(2, 5), inputs(2, LENGTH)).shape == (2, 5, SIZE)


@pytest.mark.parametrize(("rows", "keys"), [((0, 5), (0, 5)), ((2, 0), (2, 5)), ((3,), (0,))])
def test_no_rows_and_no_keys(rows: tuple[int, ...], keys: tuple[int, ...]) -> None:
    layer = Attention(causal, SIZE, heads=HEADS, kv_heads=2, key=jax.random.key(0))
    assert jnp.array_equal(layer(inputs(*rows), inputs(*keys)), jnp.zeros((*rows, SIZE)))


def test_sizes_may_be_integers_of_numpy() -> None:
    key = jax.random.key(0)
    sizes = {"size": SIZE, "heads": 4, "kv_heads": 2, "head_dim": 32}
    given = Attention(causal, **{name: np.int64(size) for name, size in sizes.items()}, key=key)  # type: ignore[arg-type]
    layer = Attention(causal, **sizes, key=key)  # type: ignore[arg-type]
    assert type(given.heads) is type(given.kv_heads) is int
    assert eqx.tree_equal(given, layer)


def test_bad_sizes_are_one_error_each() -> None:
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="kv_heads: expected a number that divides 4 heads, got 3"):
        Attention(causal, SIZE, heads=4, kv_heads=3, key=key)
    with pytest.raises(ValueError, match="head_dim: expected a number, since 5 heads do not divide size 64, got None"):
        Attention(causal, SIZE, heads=5, key=key)
    for bad in (0, -8, 2.0, "4", True):
        for name in ("size", "heads", "kv_heads", "head_dim"):
            with pytest.raises(ValueError, match=f"equinox.Attention: {name}: expected an int of at least 1, got"):
                Attention(causal, **{"size": SIZE, "heads": 4, name: bad}, key=key)  # type: ignore[arg-type]
    layer = Attention(causal, SIZE, heads=4, key=key)
    options: dict[str, Any] = {"layout": "bhsd", "return_lse": True}
    for option, value in options.items():
        with pytest.raises(ValueError, match=f"{option}: expected nothing: the module has one layout"):
            layer(inputs(LENGTH), **{option: value})
    with pytest.raises(ValueError, match=r"x: expected shape \[B, S, 64\] or \[S, 64\], got \[24, 32\]"):
        layer(jnp.ones((LENGTH, 32)))
    with pytest.raises(ValueError, match=r"context: expected .* as x has, got \[24, 64\]"):
        layer(inputs(2, LENGTH), inputs(LENGTH))
