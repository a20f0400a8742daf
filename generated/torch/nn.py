# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/torch_nn.py.jinja
# hash: ec65d58d5f1e1784
"""The attention ops as modules, which hold a variant's trained tensors as parameters, and defaults for its scalars.

The name of each module is the variant's name in CamelCase. A module is called like its op, without the arguments that
it holds: `module(q, k, v, **call)`, with q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, or in any
other way that the op's docstring names. Parameters are cast, loaded, saved and sharded as those of any module. Each
module is imported when it is first read.
"""

import typing as _typing

from .._runtime.core.lazy import lazy as _lazy

__all__ = [
    "Alibi",
    "Band",
    "BandBias",
    "BandImages",
    "BandMask",
    "BandSink",
    "BandSoftcap",
    "Causal",
    "CausalDropout",
    "Chunked",
    "Document",
    "Forgetting",
    "ForgettingPruned",
    "Full",
    "Gemma2Local",
    "GptOss",
    "Natten",
    "Padding",
    "PrefixLm",
    "RelativeBias",
    "Softcap",
    "StreamingLlm",
    "Window",
]

if _typing.TYPE_CHECKING:
    from ..alibi.torch_op import Alibi
    from ..band.torch_op import Band
    from ..band_bias.torch_op import BandBias
    from ..band_images.torch_op import BandImages
    from ..band_mask.torch_op import BandMask
    from ..band_sink.torch_op import BandSink
    from ..band_softcap.torch_op import BandSoftcap
    from ..causal.torch_op import Causal
    from ..causal_dropout.torch_op import CausalDropout
    from ..chunked.torch_op import Chunked
    from ..document.torch_op import Document
    from ..forgetting.torch_op import Forgetting
    from ..forgetting_pruned.torch_op import ForgettingPruned
    from ..full.torch_op import Full
    from ..gemma2_local.torch_op import Gemma2Local
    from ..gpt_oss.torch_op import GptOss
    from ..natten.torch_op import Natten
    from ..padding.torch_op import Padding
    from ..prefix_lm.torch_op import PrefixLm
    from ..relative_bias.torch_op import RelativeBias
    from ..softcap.torch_op import Softcap
    from ..streaming_llm.torch_op import StreamingLlm
    from ..window.torch_op import Window
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        {
            "Alibi": "..alibi.torch_op:Alibi",
            "Band": "..band.torch_op:Band",
            "BandBias": "..band_bias.torch_op:BandBias",
            "BandImages": "..band_images.torch_op:BandImages",
            "BandMask": "..band_mask.torch_op:BandMask",
            "BandSink": "..band_sink.torch_op:BandSink",
            "BandSoftcap": "..band_softcap.torch_op:BandSoftcap",
            "Causal": "..causal.torch_op:Causal",
            "CausalDropout": "..causal_dropout.torch_op:CausalDropout",
            "Chunked": "..chunked.torch_op:Chunked",
            "Document": "..document.torch_op:Document",
            "Forgetting": "..forgetting.torch_op:Forgetting",
            "ForgettingPruned": "..forgetting_pruned.torch_op:ForgettingPruned",
            "Full": "..full.torch_op:Full",
            "Gemma2Local": "..gemma2_local.torch_op:Gemma2Local",
            "GptOss": "..gpt_oss.torch_op:GptOss",
            "Natten": "..natten.torch_op:Natten",
            "Padding": "..padding.torch_op:Padding",
            "PrefixLm": "..prefix_lm.torch_op:PrefixLm",
            "RelativeBias": "..relative_bias.torch_op:RelativeBias",
            "Softcap": "..softcap.torch_op:Softcap",
            "StreamingLlm": "..streaming_llm.torch_op:StreamingLlm",
            "Window": "..window.torch_op:Window",
        },
    )
