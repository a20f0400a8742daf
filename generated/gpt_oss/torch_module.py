# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/torch_module.py.jinja
# hash: bb95473b5b556aab
"""`gpt_oss` as a module of `torch.nn`."""

import torch

from .._runtime.torch import module as base
from . import torch_op


class GptOss(base.AttentionModule):
    """The sliding-window layers of gpt-oss, a learned sink per head in the denominator (arXiv:2508.10925).

    Calls the op `gpt_oss`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.

    Args:
        heads: query heads, Hq.
        device: of the parameters. dtype: theirs, by default torch's default; any float dtype.

    Parameters:
        sink: `[heads]`, zeros at first: a logit in the denominator only.
    """

    op = staticmethod(torch_op.gpt_oss)
    entry = (("mask", "causal and window(128)"),)
    _held = (("sink", "sink"),)
    sink: torch.nn.Parameter

    def __init__(
        self, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(sizes={"heads": heads})
        self.sink = torch.nn.Parameter(torch.empty((heads,), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters with what they hold at first."""
        self.sink.zero_()
