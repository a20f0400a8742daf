# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal: {mask: causal}
# template: host/torch_module.py.jinja
# hash: 121122a057d62d0b
"""`causal` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Causal(base.AttentionModule):
    """A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

    Calls the op `causal`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.causal)
    entry = (("mask", "causal"),)

    def __init__(self) -> None:
        super().__init__()
