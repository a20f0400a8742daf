# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/jax_init.py.jinja
# hash: 53c543faf16d451f
"""The attention ops for JAX, one function per variant. Each is imported when it is first asked for."""

import importlib as _importlib
import typing as _typing

from ._runtime.jax import versions as versions  # first: it says what is missing
from ._runtime.jax.kernels import HANDLER
from ._runtime.jax.primitive import RESIDUALS

if _typing.TYPE_CHECKING:
    from .alibi.jax_op import alibi
    from .causal.jax_op import causal
    from .causal_dropout.jax_op import causal_dropout
    from .document.jax_op import document
    from .forgetting.jax_op import forgetting
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

__all__ = [
    "HANDLER",
    "RESIDUALS",
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


def __getattr__(name: str) -> _typing.Any:
    # Not kept here: an op may have the name of something that this function calls.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f".{name}.jax_op", __package__), name)


def __dir__() -> list[str]:
    return __all__
