# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: host/torch_module.py.jinja
# hash: 6d7b7efc7d88d29e
"""`forgetting` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Forgetting(base.AttentionModule):
    """Forgetting attention, a log-decay per position and head (Lin et al., 2025, arXiv:2503.02130).

    Calls the op `forgetting`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, g `[B, P, Hq]` to
    o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.forgetting)
    entry = (("mask", "causal"),)

    def __init__(self) -> None:
        super().__init__()
