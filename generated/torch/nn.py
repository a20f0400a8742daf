# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/torch_nn.py.jinja
# hash: 72dd01901d2a9d56
"""The attention ops as modules, which hold what a variant trains beside q, k and v, and defaults for its scalars.

Each is the variant's name in CamelCase. It is called like its op, without what it holds: `module(q, k, v, **call)`,
with q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, or in any other way that the op's docstring
names. Parameters are cast, loaded, saved and sharded as those of any module. Each is imported when it is first read.
"""

import typing as _typing

from .._runtime.core.lazy import lazy as _lazy

__all__ = [
    "Alibi",
    "Causal",
    "CausalDropout",
    "Document",
    "Forgetting",
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
    from ..alibi.torch_module import Alibi
    from ..causal.torch_module import Causal
    from ..causal_dropout.torch_module import CausalDropout
    from ..document.torch_module import Document
    from ..forgetting.torch_module import Forgetting
    from ..full.torch_module import Full
    from ..gemma2_local.torch_module import Gemma2Local
    from ..gpt_oss.torch_module import GptOss
    from ..natten.torch_module import Natten
    from ..padding.torch_module import Padding
    from ..prefix_lm.torch_module import PrefixLm
    from ..relative_bias.torch_module import RelativeBias
    from ..softcap.torch_module import Softcap
    from ..streaming_llm.torch_module import StreamingLlm
    from ..window.torch_module import Window
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        {
            "Alibi": "..alibi.torch_module:Alibi",
            "Causal": "..causal.torch_module:Causal",
            "CausalDropout": "..causal_dropout.torch_module:CausalDropout",
            "Document": "..document.torch_module:Document",
            "Forgetting": "..forgetting.torch_module:Forgetting",
            "Full": "..full.torch_module:Full",
            "Gemma2Local": "..gemma2_local.torch_module:Gemma2Local",
            "GptOss": "..gpt_oss.torch_module:GptOss",
            "Natten": "..natten.torch_module:Natten",
            "Padding": "..padding.torch_module:Padding",
            "PrefixLm": "..prefix_lm.torch_module:PrefixLm",
            "RelativeBias": "..relative_bias.torch_module:RelativeBias",
            "Softcap": "..softcap.torch_module:Softcap",
            "StreamingLlm": "..streaming_llm.torch_module:StreamingLlm",
            "Window": "..window.torch_module:Window",
        },
    )
