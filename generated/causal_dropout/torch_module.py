# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/torch_module.py.jinja
# hash: a671bb8a1f149a8c
"""`causal_dropout` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class CausalDropout(base.AttentionModule):
    """Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4).

    Calls the op `causal_dropout`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq,
    Sq, Dv]`.

    Args:
        dropout_p: the probability of dropout while training, of calls that give none.
    """

    op = staticmethod(torch_op.causal_dropout)
    entry = (("mask", "causal"),)

    def __init__(self, *, dropout_p: float = 0.0) -> None:
        super().__init__(dropout_p=dropout_p)
