# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: host/torch_module.py.jinja
# hash: b4773e520b228eb0
"""`natten` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Natten(base.AttentionModule):
    """Neighbourhood attention on an image of 128 x 128 positions, 13 x 13 keys (Hassani et al., 2023,
    arXiv:2204.07143).

    Calls the op `natten`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.natten)
    entry = (("mask", "natten(128, 128, 13)"),)

    def __init__(self) -> None:
        super().__init__()
