# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/jax_init.py.jinja
# hash: 33d48bbfdf01fcb5
"""The attention ops for JAX, one function per variant.

Each op is imported when it is first read, and its kernels when they are first launched.
"""

import typing as _typing

from ._runtime.core.lazy import lazy as _lazy
from ._runtime.jax import versions as versions  # first: it says what is missing

__all__ = [
    "HANDLER",
    "RESIDUALS",
    "alibi",
    "band",
    "band_bias",
    "band_images",
    "band_mask",
    "band_sink",
    "band_softcap",
    "causal",
    "causal_dropout",
    "chunked",
    "document",
    "forgetting",
    "forgetting_pruned",
    "full",
    "gemma2_local",
    "gpt_oss",
    "natten",
    "padding",
    "prefix_lm",
    "relative_bias",
    "softcap",
    "streaming_llm",
    "window",
]

if _typing.TYPE_CHECKING:
    from ._runtime.jax.kernels import HANDLER
    from ._runtime.jax.primitive import RESIDUALS
    from .alibi.jax_op import alibi
    from .band.jax_op import band
    from .band_bias.jax_op import band_bias
    from .band_images.jax_op import band_images
    from .band_mask.jax_op import band_mask
    from .band_sink.jax_op import band_sink
    from .band_softcap.jax_op import band_softcap
    from .causal.jax_op import causal
    from .causal_dropout.jax_op import causal_dropout
    from .chunked.jax_op import chunked
    from .document.jax_op import document
    from .forgetting.jax_op import forgetting
    from .forgetting_pruned.jax_op import forgetting_pruned
    from .full.jax_op import full
    from .gemma2_local.jax_op import gemma2_local
    from .gpt_oss.jax_op import gpt_oss
    from .natten.jax_op import natten
    from .padding.jax_op import padding
    from .prefix_lm.jax_op import prefix_lm
    from .relative_bias.jax_op import relative_bias
    from .softcap.jax_op import softcap
    from .streaming_llm.jax_op import streaming_llm
    from .window.jax_op import window
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        {
            "HANDLER": "._runtime.jax.kernels:HANDLER",
            "RESIDUALS": "._runtime.jax.primitive:RESIDUALS",
            "alibi": ".alibi.jax_op:alibi",
            "band": ".band.jax_op:band",
            "band_bias": ".band_bias.jax_op:band_bias",
            "band_images": ".band_images.jax_op:band_images",
            "band_mask": ".band_mask.jax_op:band_mask",
            "band_sink": ".band_sink.jax_op:band_sink",
            "band_softcap": ".band_softcap.jax_op:band_softcap",
            "causal": ".causal.jax_op:causal",
            "causal_dropout": ".causal_dropout.jax_op:causal_dropout",
            "chunked": ".chunked.jax_op:chunked",
            "document": ".document.jax_op:document",
            "forgetting": ".forgetting.jax_op:forgetting",
            "forgetting_pruned": ".forgetting_pruned.jax_op:forgetting_pruned",
            "full": ".full.jax_op:full",
            "gemma2_local": ".gemma2_local.jax_op:gemma2_local",
            "gpt_oss": ".gpt_oss.jax_op:gpt_oss",
            "natten": ".natten.jax_op:natten",
            "padding": ".padding.jax_op:padding",
            "prefix_lm": ".prefix_lm.jax_op:prefix_lm",
            "relative_bias": ".relative_bias.jax_op:relative_bias",
            "softcap": ".softcap.jax_op:softcap",
            "streaming_llm": ".streaming_llm.jax_op:streaming_llm",
            "window": ".window.jax_op:window",
        },
    )
