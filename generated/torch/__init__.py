# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/torch_init.py.jinja
# hash: a790fe904835a395
"""The attention ops for PyTorch, one function per variant; `nn` has them as modules, with parameters of their own.

Each op is imported when it is first read, and its kernels when they are first launched.
"""

import typing as _typing

from .._runtime import torch as _runtime  # so that `torch.ops` finds the operators of the package
from .._runtime.core.lazy import lazy as _lazy

__all__ = [
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
    from ..alibi.torch_op import alibi
    from ..band.torch_op import band
    from ..band_bias.torch_op import band_bias
    from ..band_images.torch_op import band_images
    from ..band_mask.torch_op import band_mask
    from ..band_sink.torch_op import band_sink
    from ..band_softcap.torch_op import band_softcap
    from ..causal.torch_op import causal
    from ..causal_dropout.torch_op import causal_dropout
    from ..chunked.torch_op import chunked
    from ..document.torch_op import document
    from ..forgetting.torch_op import forgetting
    from ..forgetting_pruned.torch_op import forgetting_pruned
    from ..full.torch_op import full
    from ..gemma2_local.torch_op import gemma2_local
    from ..gpt_oss.torch_op import gpt_oss
    from ..natten.torch_op import natten
    from ..padding.torch_op import padding
    from ..prefix_lm.torch_op import prefix_lm
    from ..relative_bias.torch_op import relative_bias
    from ..softcap.torch_op import softcap
    from ..streaming_llm.torch_op import streaming_llm
    from ..window.torch_op import window
    from . import nn as nn
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        {
            "nn": ".nn",
            "alibi": "..alibi.torch_op:alibi",
            "band": "..band.torch_op:band",
            "band_bias": "..band_bias.torch_op:band_bias",
            "band_images": "..band_images.torch_op:band_images",
            "band_mask": "..band_mask.torch_op:band_mask",
            "band_sink": "..band_sink.torch_op:band_sink",
            "band_softcap": "..band_softcap.torch_op:band_softcap",
            "causal": "..causal.torch_op:causal",
            "causal_dropout": "..causal_dropout.torch_op:causal_dropout",
            "chunked": "..chunked.torch_op:chunked",
            "document": "..document.torch_op:document",
            "forgetting": "..forgetting.torch_op:forgetting",
            "forgetting_pruned": "..forgetting_pruned.torch_op:forgetting_pruned",
            "full": "..full.torch_op:full",
            "gemma2_local": "..gemma2_local.torch_op:gemma2_local",
            "gpt_oss": "..gpt_oss.torch_op:gpt_oss",
            "natten": "..natten.torch_op:natten",
            "padding": "..padding.torch_op:padding",
            "prefix_lm": "..prefix_lm.torch_op:prefix_lm",
            "relative_bias": "..relative_bias.torch_op:relative_bias",
            "softcap": "..softcap.torch_op:softcap",
            "streaming_llm": "..streaming_llm.torch_op:streaming_llm",
            "window": "..window.torch_op:window",
        },
    )

del _runtime
