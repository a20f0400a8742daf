# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/torch_nn.py.jinja
# hash: e610d24ce361fe3b
"""The attention ops as modules, which hold what a variant trains beside q, k and v, and defaults for its scalars.

Each is the variant's name in CamelCase. It is called like its op, without what it holds: `module(q, k, v, **call)`,
with q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, or in any other way that the op's docstring
names. Parameters are cast, loaded, saved and sharded as those of any module.
"""

import torch

from .. import torch as ops
from .._runtime.torch import module as base

__all__ = [
    "Alibi",
    "Causal",
    "CausalDropout",
    "Document",
    "Forgetting",
    "Full",
    "Gemma2Local",
    "GptOss",
    "Natten",
    "Padding",
    "PrefixLm",
    "RelativeBias",
    "Softcap",
    "StreamingLlm",
    "Window",
]


class Full(base.AttentionModule):
    """Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762).

    Calls the op `full`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.full)

    def __init__(self) -> None:
        super().__init__()


class Causal(base.AttentionModule):
    """A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

    Calls the op `causal`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.causal)
    entry = (("mask", "causal"),)

    def __init__(self) -> None:
        super().__init__()


class CausalDropout(base.AttentionModule):
    """Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4).

    Calls the op `causal_dropout`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq,
    Sq, Dv]`.

    Args:
        dropout_p: the probability of dropout while training, of calls that give none.
    """

    op = staticmethod(ops.causal_dropout)
    entry = (("mask", "causal"),)

    def __init__(self, *, dropout_p: float = 0.0) -> None:
        super().__init__(dropout_p=dropout_p)


class Window(base.AttentionModule):
    """Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825).

    Calls the op `window`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.

    Args:
        size: int, the `size` of calls that give none.
    """

    op = staticmethod(ops.window)
    entry = (("mask", "causal and window(size)"),)

    def __init__(self, *, size: int | None = None) -> None:
        super().__init__(scalars={"size": size})


class PrefixLm(base.AttentionModule):
    """Causal, but for a prefix of `length` keys that every query attends to (Raffel et al., 2020, arXiv:1910.10683).

    Calls the op `prefix_lm`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.

    Args:
        length: int, the `length` of calls that give none.
    """

    op = staticmethod(ops.prefix_lm)
    entry = (("mask", "causal or prefix(length)"),)

    def __init__(self, *, length: int | None = None) -> None:
        super().__init__(scalars={"length": length})


class Document(base.AttentionModule):
    """Causal within each document of a packed row; `doc` numbers them, in any order.

    Calls the op `document`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, doc `[b, kv_idx]` to
    o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.document)
    entry = (("mask", "causal and doc[b, q_idx] == doc[b, kv_idx]"),)

    def __init__(self) -> None:
        super().__init__()


class Padding(base.AttentionModule):
    """Keys from `length[b]` on are padding, which no query attends to (Vaswani et al., 2017, arXiv:1706.03762).

    Calls the op `padding`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, length `[b]` to o
    `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.padding)
    entry = (("mask", "kv_idx < length[b]"),)

    def __init__(self) -> None:
        super().__init__()


class StreamingLlm(base.AttentionModule):
    """A causal window of `size`, and the first `sinks` keys, kept for good (Xiao et al., 2024, arXiv:2309.17453).

    Calls the op `streaming_llm`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq,
    Sq, Dv]`.

    Args:
        size: int, the `size` of calls that give none.
        sinks: int, the `sinks` of calls that give none.
    """

    op = staticmethod(ops.streaming_llm)
    entry = (("mask", "causal and (window(size) or prefix(sinks))"),)

    def __init__(self, *, size: int | None = None, sinks: int | None = None) -> None:
        super().__init__(scalars={"size": size, "sinks": sinks})


class Natten(base.AttentionModule):
    """Neighbourhood attention on an image of 128 x 128 positions, 13 x 13 keys (Hassani et al., 2023,
    arXiv:2204.07143).

    Calls the op `natten`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.natten)
    entry = (("mask", "natten(128, 128, 13)"),)

    def __init__(self) -> None:
        super().__init__()


class Softcap(base.AttentionModule):
    """Causal with logits capped at 20 (Bello et al., 2016, arXiv:1611.09940, section 5.1).

    Calls the op `softcap`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.
    """

    op = staticmethod(ops.softcap)
    entry = (("mask", "causal"), ("score", "softcap(20.0)"))

    def __init__(self) -> None:
        super().__init__()


class Gemma2Local(base.AttentionModule):
    """The local layers of Gemma 2, a window of 4096 and logits capped at 50 (arXiv:2408.00118, table 1).

    Calls the op `gemma2_local`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq,
    Dv]`.
    """

    op = staticmethod(ops.gemma2_local)
    entry = (("mask", "causal and window(4096)"), ("score", "softcap(50.0)"))

    def __init__(self) -> None:
        super().__init__()


class Alibi(base.AttentionModule):
    """Attention with linear biases; the slopes may be trained (Press et al., 2022, arXiv:2108.12409).

    Calls the op `alibi`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]` to o `[B, Hq, Sq, Dv]`.

    Args:
        heads: query heads, Hq.
        device: of the parameters. dtype: theirs, by default torch's default; any float dtype.

    Parameters:
        slope: `[heads]`, zeros at first.
    """

    op = staticmethod(ops.alibi)
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

    op = staticmethod(ops.relative_bias)
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


class Forgetting(base.AttentionModule):
    """Forgetting attention, a log-decay per position and head (Lin et al., 2025, arXiv:2503.02130).

    Calls the op `forgetting`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, g `[B, P, Hq]` to
    o `[B, Hq, Sq, Dv]`.
    """

    op = staticmethod(ops.forgetting)
    entry = (("mask", "causal"),)

    def __init__(self) -> None:
        super().__init__()


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

    op = staticmethod(ops.gpt_oss)
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
