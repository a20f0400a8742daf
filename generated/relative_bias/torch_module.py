# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/torch_module.py.jinja
# hash: 6e8ae4803139494f
"""`relative_bias` as a module of `torch.nn`."""

import torch

from .._runtime.torch import module as base
from . import torch_op


class RelativeBias(base.AttentionModule):
    """A learned bias per head and distance; those beyond the table have its last (Raffel et al., 2020,
    arXiv:1910.10683).

    Calls the op `relative_bias`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq,
    Sq, Dv]`.

    Args:
        heads: query heads, Hq.
        distances: size of the dim `distances`.
        device: of the parameters. dtype: theirs, by default torch's default; any float dtype.

    Parameters:
        bias: `[heads, distances]`, zeros at first.
    """

    op = staticmethod(torch_op.relative_bias)
    entry = (("mask", "causal"), ("score", "score + bias[h, q_idx - kv_idx]"))
    _held = (("bias", "bias"),)
    bias: torch.nn.Parameter

    def __init__(
        self, heads: int, distances: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(sizes={"heads": heads, "distances": distances})
        self.bias = torch.nn.Parameter(torch.empty((heads, distances), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters with what they hold at first."""
        self.bias.zero_()
