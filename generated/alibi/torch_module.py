# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/torch_module.py.jinja
# hash: a9297b10ed42ba16
"""`alibi` as a module of `torch.nn`."""

import torch

from .._runtime.torch import module as base
from . import torch_op


class Alibi(base.AttentionModule):
    """Attention with linear biases; the slopes may be trained (Press et al., 2022, arXiv:2108.12409).

    Calls the op `alibi`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.

    Args:
        heads: query heads, Hq.
        device: of the parameters. dtype: theirs, by default torch's default; any float dtype.

    Parameters:
        slope: `[heads]`, zeros at first.
    """

    op = staticmethod(torch_op.alibi)
    entry = (("mask", "causal"), ("score", "alibi"))
    _held = (("slope", "slope"),)
    slope: torch.nn.Parameter

    def __init__(
        self, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(sizes={"heads": heads})
        self.slope = torch.nn.Parameter(torch.empty((heads,), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters with what they hold at first."""
        self.slope.zero_()
