"""`generated.integrations.maxtext` on a stand-in of MaxText's `AttentionOp`: which op computes a call of which layer.
`test_maxtext.py` compares the results with MaxText's own attention."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax", reason="MaxText's layers are JAX's")

import jax
import jax.numpy as jnp
from jax import Array

from generated import jax as ops
from generated._runtime.core.checks import ArgumentError

S = 20


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    MLA = "mla"
    COMPRESSED = "compressed"
    FULL = "full"


class AttentionOp:
    """A layer with the attributes that the integration reads, and the arguments of MaxText 0.2.5."""

    def __init__(self, kernel: str = "codegen", kind: AttentionType = AttentionType.GLOBAL, **given: Any) -> None:
        self.attention_kernel, self.attention_type = kernel, kind
        self.sliding_window_size = self.chunk_attn_window_size = self.attn_logits_soft_cap = None
        self.dropout_rate, self.parts = 0.0, 1
        self.config = SimpleNamespace(moba=False)
        vars(self).update(given)

    def _context_parallel_size(self) -> int:
        return self.parts

    def apply_attention(
        self,
        query: Array,  # noqa: ARG002 - the arguments are MaxText's
        key: Array,  # noqa: ARG002
        value: Array,  # noqa: ARG002
        decoder_segment_ids: Array | None,  # noqa: ARG002
        segment_positions: Array | None,  # noqa: ARG002
        lengths: Array | None,  # noqa: ARG002
        model_mode: str,  # noqa: ARG002
        use_ragged_attention: bool = False,  # noqa: ARG002
        previous_chunk: Any = None,  # noqa: ARG002
        bidirectional_mask: Any = None,  # noqa: ARG002
        sinks: Array | None = None,  # noqa: ARG002
        indexer_mask: Array | None = None,  # noqa: ARG002
        decoder_segment_ids_kv: Array | None = None,  # noqa: ARG002
        *,
        qk_product_einsum: Any,  # noqa: ARG002
        wv_product_einsum: Any,  # noqa: ARG002
    ) -> Any:
        return "MaxText's own"

    def __call__(self, q: Array, k: Array, v: Array, *, ids: Any = None, mode: str = "train", **call: Any) -> Any:
        products: dict[str, Any] = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
        return self.apply_attention(q, k, v, ids, None, None, mode, **call, **products)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration, installed into modules that have the names of MaxText's."""
    common, layers = ModuleType("maxtext.common.common_types"), ModuleType("maxtext.layers.attention_op")
    common.__dict__.update(MODEL_MODE_TRAIN="train", AttentionType=AttentionType)
    layers.__dict__.update(AttentionOp=AttentionOp)
    for name in ("maxtext", "maxtext.common", "maxtext.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for each in (common, layers):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, "generated.integrations.maxtext", raising=False)
    found = importlib.import_module("generated.integrations.maxtext")
    found.install()
    yield found
    found.uninstall()
    sys.modules.pop("generated.integrations.maxtext", None)


@pytest.fixture(scope="module")
def qkv() -> list[Array]:
    return [jax.random.normal(jax.random.key(i), (2, S, heads, 16)) for i, heads in enumerate((4, 2, 2))]


SINK = jnp.arange(4.0)
IMAGE = jnp.zeros((2, S), bool).at[:, 3:6].set(True).at[0, 7].set(True)
NUMBERS = jnp.full((2, S), -1).at[:, 3:6].set(0).at[0, 7].set(1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "causal": ({}, {}, "causal", {}),
    "latent": ({"kind": AttentionType.MLA}, {}, "causal", {}),
    "full": ({"kind": AttentionType.FULL}, {}, "full", {}),
    "window": ({"kind": AttentionType.LOCAL_SLIDING, "sliding_window_size": 5}, {}, "window", {"size": 5}),
    "unused window": ({"sliding_window_size": 5}, {}, "causal", {}),
    "chunk": ({"kind": AttentionType.CHUNK, "chunk_attn_window_size": 6}, {}, "chunked", {"size": 6}),
    "cap": ({"attn_logits_soft_cap": 3.0}, {}, "band_softcap", {"before": S, "after": 0, "cap": 3.0}),
    "sinks": ({}, {"sinks": SINK}, "band_sink", {"before": S, "after": 0, "sink": SINK}),
    "images": ({}, {"bidirectional_mask": IMAGE}, "band_images", {"before": S, "after": 0, "image": NUMBERS}),
}


@pytest.mark.parametrize("case", CASES)
def test_variants(qkv: list[Array], case: str) -> None:
    layer, call, name, arguments = CASES[case]
    op: Any = getattr(ops, name)

    @jax.jit
    def both(qkv: list[Array]) -> tuple[Array, Array]:
        o, *rest = AttentionOp(**layer)(*qkv, **call)
        assert rest == [None, None]
        return o, op(*qkv, scale=1.0, **arguments)

    got, want = both(qkv)
    assert jnp.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_documents(qkv: list[Array]) -> None:
    ids = jnp.array([[1] * 8 + [2] * 12, [3] * 15 + [0] * 5])
    other = jnp.array([[9] * 4 + [1] * 4 + [2] * 12, [3] * 15 + [0] * 5])

    @jax.jit
    def all_four(qkv: list[Array]) -> tuple[Array, Array]:
        got = AttentionOp()(*qkv, ids=ids)[0], AttentionOp()(*qkv, ids=ids, decoder_segment_ids_kv=other)[0]
        keys = ids, other
        op: Any = ops.causal
        want = (op(*qkv, scale=1.0, q_segment_ids=ids, kv_segment_ids=each) for each in keys)
        return jnp.stack(got), jnp.stack([*want])

    got, want = all_four(qkv)
    assert jnp.allclose(got, want, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "decoding": ({}, {"mode": "autoregressive"}, "model_mode: expected 'train': decode with attention=dot_product"),
    "indexer": ({}, {"indexer_mask": SINK}, "indexer_mask: expected None or False: use attention=dot_product"),
    "chunks": ({}, {"previous_chunk": SINK}, "previous_chunk: expected None or False"),
    "kind": ({"kind": AttentionType.COMPRESSED}, {}, "attention_type: expected one of global, .*got 'compressed'"),
    "moba": ({"config": SimpleNamespace(moba=True)}, {}, "moba: expected none of it"),
    "dropout": ({"dropout_rate": 0.1}, {}, "dropout_rate: expected none of it: use another attention, got 0.1"),
    "no window": ({"kind": AttentionType.LOCAL_SLIDING}, {}, "sliding_window_size: expected a size .*got None"),
    "no chunk": ({"kind": AttentionType.CHUNK}, {}, "chunk_attn_window_size: expected a size .*got None"),
    "context": ({"parts": 4}, {}, "context parallelism: expected 1, .*generated.jax_parallel splits sequences, got 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused(qkv: list[Array], case: str) -> None:
    layer, call, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        AttentionOp(**layer)(*qkv, **call)


def test_other_kernels_stay_as_they_are(qkv: list[Array], module: Any) -> None:
    assert AttentionOp("flash")(*qkv) == "MaxText's own"
    module.install()
    module.uninstall()
    assert AttentionOp()(*qkv) == "MaxText's own"
