# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/torch_module.py.jinja
# hash: 1a561e9726d7d3c3
"""`document` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class Document(base.AttentionModule):
    """Causal within each document of a packed row; `doc` numbers them, in any order.

    Calls the op `document`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, doc `[b, kv_idx]` to
    o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(torch_op.document)
    entry = (("mask", "causal and doc[b, q_idx] == doc[b, kv_idx]"),)

    def __init__(self) -> None:
        super().__init__()
