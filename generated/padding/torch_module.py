# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: host/torch_module.py.jinja
# hash: 4c703276cbd0cf73
"""`padding` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Padding(base.AttentionModule):
    """Keys from `length[b]` on are padding, which no query attends to (Vaswani et al., 2017, arXiv:1706.03762).

    Calls the op `padding`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, length `[b]` to o
    `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.padding)
    entry = (("mask", "kv_idx < length[b]"),)

    def __init__(self) -> None:
        super().__init__()
