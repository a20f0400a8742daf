"""`generated.integrations.maxtext` compared with MaxText's own dot product attention, on the CPU: MaxText 0.2.5, which
needs Python 3.12 and JAX 0.11.1 or newer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

maxtext = pytest.importorskip("maxtext", reason="MaxText is in none of the extras: it needs Python 3.12")
# MaxText then does not use Google's cloud.
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax import Array  # noqa: E402
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_TRAIN, AttentionType  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.layers.attention_op import AttentionOp  # noqa: E402

from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated.integrations.maxtext import NAME, install, uninstall  # noqa: E402
from generated.integrations.variants import NotRenderedError  # noqa: E402

B, S, H, K, D = 2, 24, 4, 2, 16
IDS = jnp.array([[1] * 10 + [2] * 14, [3] * 20 + [0] * 4], jnp.int32)
"""A row of two documents, and a row of one document and padding, which has the id 0 in MaxText."""


@pytest.fixture(scope="module")
def config() -> Any:
    base = Path(maxtext.__file__).parent / "configs/base.yml"
    small = {"max_target_length": S, "per_device_batch_size": B, "head_dim": D, "dtype": "float32", "hardware": "cpu"}
    small |= {"run_name": "test", "enable_checkpointing": False, "skip_jax_distributed_system": True}
    return pyconfig.initialize(["", str(base), "attention=codegen", *(f"{k}={v}" for k, v in small.items())])


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    install()
    install()
    yield
    uninstall()


def op(config: Any, kernel: str, **layer: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
    sizes = {"max_target_length": S, "num_query_heads": H, "num_kv_heads": K, "float32_logits": True}
    return AttentionOp(config, mesh, kernel, **sizes, **layer)


def drawn(*more: tuple[int, ...]) -> list[Array]:
    """q, k, v, and further arrays of these shapes."""
    shapes = [(B, S, H, D), (B, S, K, D), (B, S, K, D), *more]
    return [2 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def results(layer: Any, arrays: list[Array], ids: Array | None, **call: Any) -> tuple[Array, list[Array]]:
    """o, and the gradient of each array; a fourth array holds sinks. q is scaled as in MaxText's layers."""

    def loss(arrays: list[Array]) -> tuple[Array, Array]:
        q, k, v, *sinks = arrays
        given = {**call, "sinks": nnx.Param(sinks[0])} if sinks else call
        o = layer(q * D**-0.5, k, v, ids, None, MODEL_MODE_TRAIN, **given)
        weights = jax.random.normal(jax.random.key(9), o.shape)
        # Nobody reads the results of padding.
        is_read = 1.0 if ids is None else (ids > 0)[:, :, None, None]
        return (o * weights * is_read).sum(), o * is_read

    (_, o), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return o, gradients


LAYERS: dict[str, dict[str, Any]] = {
    "global": {},
    "window": {"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 5},
    "chunk": {"attention_type": AttentionType.CHUNK, "chunk_attn_window_size": 6},
    "full": {"attention_type": AttentionType.FULL},
    "softcap": {"attn_logits_soft_cap": 3.0},
    "gemma 2": {"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 5, "attn_logits_soft_cap": 3.0},
}


@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "documents"])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_and_gradients(config: Any, kind: str, ids: Array | None) -> None:
    arrays = drawn()
    got = results(op(config, NAME, **LAYERS[kind]), arrays, ids)
    want = results(op(config, "dot_product", **LAYERS[kind]), arrays, ids)
    # float32: sums of at most 24 terms around 1, rounded in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("kind", ["global", "window"])
def test_sinks(config: Any, kind: str) -> None:
    arrays = drawn((H,))
    got = results(op(config, NAME, **LAYERS[kind]), arrays, IDS)
    want = results(op(config, "dot_product", **LAYERS[kind]), arrays, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_images(config: Any) -> None:
    image = jnp.zeros((B, S), bool).at[:, 3:8].set(True).at[0, 12:15].set(True).at[1, 0].set(True)
    call = {"bidirectional_mask": image}
    arrays = drawn()
    got = results(op(config, NAME), arrays, None, **call)
    want = results(op(config, "dot_product"), arrays, None, **call)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_what_is_not_served_is_refused(config: Any) -> None:
    q, k, v = drawn()
    layer = op(config, NAME)
    with pytest.raises(
        ArgumentError, match="model_mode: expected 'train': decode with attention=dot_product, got 'auto"
    ):
        layer(q, k, v, None, None, MODEL_MODE_AUTOREGRESSIVE, cached_values=[(k, v, None), None])
    with pytest.raises(ArgumentError, match="record_max_logits: expected None or False: use attention=dot_product"):
        layer(q, k, v, None, None, MODEL_MODE_TRAIN, record_max_logits=True)
    with pytest.raises(ArgumentError, match="indexer_mask: expected None or False: use attention=dot_product"):
        layer(q, k, v, None, None, MODEL_MODE_TRAIN, indexer_mask=jnp.zeros((B, S, S)))
    with pytest.raises(ArgumentError, match=r"attention_type: expected one of global, .*got 'compressed'"):
        op(config, NAME, attention_type=AttentionType.COMPRESSED)(q, k, v, None, None, MODEL_MODE_TRAIN)
    call = {"bidirectional_mask": jnp.zeros((B, S), bool)}
    with pytest.raises(NotRenderedError, match=r"scores capped at 3\.0, images"):
        op(config, NAME, attn_logits_soft_cap=3.0)(q, k, v, None, None, MODEL_MODE_TRAIN, **call)


def test_uninstall_leaves_maxtext_as_it_was(config: Any) -> None:
    uninstall()
    q, k, v = drawn()
    with pytest.raises(ValueError, match="Unexpected attention kernel"):
        op(config, NAME)(q, k, v, None, None, MODEL_MODE_TRAIN)
