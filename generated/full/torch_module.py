# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/torch_module.py.jinja
# hash: 62070aed4e18297f
"""`full` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Full(base.AttentionModule):
    """Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762).

    Calls the op `full`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.full)

    def __init__(self) -> None:
        super().__init__()
