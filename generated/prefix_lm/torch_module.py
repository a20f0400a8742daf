# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/torch_module.py.jinja
# hash: 93cfa7cdf0617124
"""`prefix_lm` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class PrefixLm(base.AttentionModule):
    """Causal, but for a prefix of `length` keys that every query attends to (Raffel et al., 2020, arXiv:1910.10683).

    Calls the op `prefix_lm`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.

    Args:
        length: int, the `length` of calls that give none.
    """

    op = staticmethod(torch_op.prefix_lm)
    entry = (("mask", "causal or prefix(length)"),)

    def __init__(self, *, length: int | None = None) -> None:
        super().__init__(scalars={"length": length})
