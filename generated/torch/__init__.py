# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/torch_init.py.jinja
# hash: c7b98f3fa333a458
"""The attention ops for PyTorch, one function per variant; `nn` has them as modules, with parameters of their own."""

from importlib import import_module
from typing import Any

from ..alibi.torch_op import alibi
from ..causal.torch_op import causal
from ..causal_dropout.torch_op import causal_dropout
from ..document.torch_op import document
from ..forgetting.torch_op import forgetting
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

__all__ = [
    "alibi",
    "causal",
    "causal_dropout",
    "document",
    "forgetting",
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


def __getattr__(name: str) -> Any:
    # Imported when it is first asked for.
    if name == "nn":
        return import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "nn"]
