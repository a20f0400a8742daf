"""The ops as an attention of MaxText: `install()`, and `attention=codegen` in its config.

MaxText picks an implementation by name in `AttentionOp.apply_attention` and has no registry, so `install` wraps that
method. The variant of a layer follows from its type of attention, window, chunk and cap, and from the sinks and images
of the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax.numpy as jnp
from jax import Array
from maxtext.common.common_types import MODEL_MODE_TRAIN, AttentionType
from maxtext.layers.attention_op import AttentionOp

from .. import jax as ops
from .._runtime.core.checks import fail
from .entries import Attention
from .variants import find

__all__ = ["NAME", "install", "uninstall"]

NAME = "codegen"
"""The value of `attention=` in MaxText's config."""

_TITLE = f"maxtext attention={NAME}"
_SERVED = (
    AttentionType.GLOBAL,
    AttentionType.LOCAL_SLIDING,
    AttentionType.CHUNK,
    AttentionType.FULL,
    AttentionType.MLA,
)
# The arguments that a call may use. Any other argument outside of _NOT_READ must be None or False.
_READ = {
    "self",
    "query",
    "key",
    "value",
    "decoder_segment_ids",
    "decoder_segment_ids_kv",
    "bidirectional_mask",
    "sinks",
}
_NOT_READ = {
    # MaxText reads positions only under context parallelism. The sizes and einsums are for its other kernels.
    *("segment_positions", "lengths", "model_mode", "use_ragged_attention"),
    *("qk_product_einsum", "wv_product_einsum", "pad_kv_total", "compress_ratio"),
}

_original: Callable[..., Any] | None = None


def install() -> None:
    """Let `AttentionOp.apply_attention` compute layers with `attention=codegen` by the ops. Second calls do nothing."""
    global _original
    if _original is not None:
        return
    original = _original = AttentionOp.apply_attention
    signature = inspect.signature(original)

    @wraps(original)
    def apply_attention(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.attention_kernel != NAME:
            return original(self, *args, **keywords)
        call = signature.bind(self, *args, **keywords).arguments
        return _attend(self, call), None, None

    AttentionOp.apply_attention = apply_attention


def uninstall() -> None:
    """Undo `install`."""
    global _original
    if _original is not None:
        AttentionOp.apply_attention, _original = _original, None


def _attend(layer: Any, call: Mapping[str, Any]) -> Array:
    """o `[B, S, H, Dv]` of q `[B, S, H, D]`, already scaled, k `[B, S, Hkv, D]` and v `[B, S, Hkv, Dv]`."""
    _check(layer, call)
    found = find(_wanted(layer, call))
    given: dict[str, Any] = dict(found.scalars)
    if call.get("sinks") is not None:
        given["sink"] = jnp.asarray(call["sinks"])  # a parameter of Flax
    if call.get("bidirectional_mask") is not None:
        given[str(found.image)] = _images(call["bidirectional_mask"])
    ids = call.get("decoder_segment_ids")
    if ids is not None:
        kv_ids = call.get("decoder_segment_ids_kv")
        given |= {"q_segment_ids": ids, "kv_segment_ids": ids if kv_ids is None else kv_ids}
    op: Any = getattr(ops, found.name)
    o: Array = op(call["query"], call["key"], call["value"], scale=1.0, **given)
    return o


def _wanted(layer: Any, call: Mapping[str, Any]) -> Attention:
    """What a layer computes."""
    kind = layer.attention_type
    window = layer.sliding_window_size if kind is AttentionType.LOCAL_SLIDING else None
    return Attention(
        before=None if window is None else window - 1,
        after=None if kind is AttentionType.FULL else 0,
        chunk=layer.chunk_attn_window_size if kind is AttentionType.CHUNK else None,
        images=call.get("bidirectional_mask") is not None,
        cap=layer.attn_logits_soft_cap or None,
        sink=call.get("sinks") is not None,
    )


def _images(is_image: Array) -> Array:
    """The image index of each token `[B, S]`, -1 for text: consecutive image tokens form one image."""
    tokens = is_image.astype(jnp.int32)
    begins = tokens * (1 - jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])
    return jnp.where(tokens > 0, jnp.cumsum(begins, axis=1) - 1, -1)


def _check(layer: Any, call: Mapping[str, Any]) -> None:
    """Refuse calls for which the ops would not compute the same as MaxText's own attention."""
    if call["model_mode"] != MODEL_MODE_TRAIN:
        fail(_TITLE, "model_mode", f"{MODEL_MODE_TRAIN!r}: decode with attention=dot_product", repr(call["model_mode"]))
    if layer.attention_type not in _SERVED:
        names = ", ".join(kind.value for kind in _SERVED)
        fail(_TITLE, "attention_type", f"one of {names}", repr(layer.attention_type.value))
    for name, value in call.items():
        if name not in _READ | _NOT_READ and value is not None and value is not False:
            fail(_TITLE, name, "None or False: use attention=dot_product", type(value).__name__)
    for kind, name in (
        (AttentionType.LOCAL_SLIDING, "sliding_window_size"),
        (AttentionType.CHUNK, "chunk_attn_window_size"),
    ):
        if layer.attention_type is kind and not getattr(layer, name):
            fail(_TITLE, name, f"a size beside attention_type {kind.value!r}", getattr(layer, name))
    for name, value in (("moba", layer.config.moba), ("dropout_rate", layer.dropout_rate)):
        if value:
            fail(_TITLE, name, "none of it: use another attention", value)
    if (parts := layer._context_parallel_size()) > 1:
        expected = "1, a sequence on one device: generated.jax_parallel splits sequences"
        fail(_TITLE, "context parallelism", expected, parts)
