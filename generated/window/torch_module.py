# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/torch_module.py.jinja
# hash: 712a635e74e0d38c
"""`window` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Window(base.AttentionModule):
    """Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825).

    Calls the op `window`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.

    Args:
        size: int, the `size` of calls that give none.
    """

    op = staticmethod(torch_op.window)
    entry = (("mask", "causal and window(size)"),)

    def __init__(self, *, size: int | None = None) -> None:
        super().__init__(scalars={"size": size})
