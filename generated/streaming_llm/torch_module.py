# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: streaming_llm: {mask: causal and (window(size) or prefix(sinks)), scalars: {size: {type: int, min: 1,
#     example: 256}, sinks: {type: int, min: 0, example: 4}}}
# template: host/torch_module.py.jinja
# hash: 01722b46c42db627
"""`streaming_llm` as a module of `torch.nn`."""

from .._runtime.torch import module as base
from . import torch_op


class StreamingLlm(base.AttentionModule):
    """A causal window of `size`, and the first `sinks` keys, kept for good (Xiao et al., 2024, arXiv:2309.17453).

    Calls the op `streaming_llm`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq,
    Sq, Dv]`.

    Args:
        size: int, the `size` of calls that give none.
        sinks: int, the `sinks` of calls that give none.
    """

    op = staticmethod(torch_op.streaming_llm)
    entry = (("mask", "causal and (window(size) or prefix(sinks))"),)

    def __init__(self, *, size: int | None = None, sinks: int | None = None) -> None:
        super().__init__(scalars={"size": size, "sinks": sinks})
