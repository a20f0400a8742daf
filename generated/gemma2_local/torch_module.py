# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/torch_module.py.jinja
# hash: 31e3c8f6227ea28d
"""`gemma2_local` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Gemma2Local(base.AttentionModule):
    """The local layers of Gemma 2, a window of 4096 and logits capped at 50 (arXiv:2408.00118, table 1).

    Calls the op `gemma2_local`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.
    """

    op = staticmethod(torch_op.gemma2_local)
    entry = (("mask", "causal and window(4096)"), ("score", "softcap(50.0)"))

    def __init__(self) -> None:
        super().__init__()
