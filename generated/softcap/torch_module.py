# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: host/torch_module.py.jinja
# hash: 63539edf99316f00
"""`softcap` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Softcap(base.AttentionModule):
    """Causal with logits capped at 20 (Bello et al., 2016, arXiv:1611.09940, section 5.1).

    Calls the op `softcap`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.
    """

    op = staticmethod(torch_op.softcap)
    entry = (("mask", "causal"), ("score", "softcap(20.0)"))

    def __init__(self) -> None:
        super().__init__()
