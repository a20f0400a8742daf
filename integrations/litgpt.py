"""The ops as the attention of litgpt's models: `use(model)`, or `CodegenAttention` as a base of your own class.

    model = use(GPT.from_name("gemma-2-2b"))

The model's config decides the variant: causal, with a sliding window in the layers that have one, and with a softcap if
the config sets one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import torch as ops
from .._runtime.core.checks import fail
from .entries import Attention, constant
from .variants import BEYOND, find

__all__ = ["CodegenAttention", "use"]

_TITLE = "litgpt"

Model = TypeVar("Model", bound=torch.nn.Module)


class CodegenAttention(torch.nn.Module):
    """Computes the attention of litgpt's `CausalSelfAttention` or `MultiheadLatentAttention`: list it before that base.

    litgpt repeats key heads, and fills a mask `[T, T]` row by row in each layer with a window. Here the op reads each
    key head once, and no such mask is made.
    """

    config: Any
    mscale: float
    kv_cache: Any
    apply_sliding_window_attention: bool = False
    _input_pos: Tensor | None = None
    _window: int | None = None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        input_pos: Tensor | None = None,
        input_pos_maxp1: int | None = None,
    ) -> Tensor:
        """litgpt's forward: x `[B, T, C]` to `[B, T, C]`; with `input_pos` it uses the KV cache."""
        windowed = self.apply_sliding_window_attention
        self._input_pos, self._window = input_pos, self.config.sliding_window_size if windowed else None
        # Without the flag, litgpt fills no window mask. With a cache the flag stays: litgpt also takes the number of
        # a mask's keys from it.
        self.apply_sliding_window_attention = windowed and input_pos is not None
        try:
            o: Tensor = super().forward(x, cos, sin, mask, input_pos, input_pos_maxp1)
        finally:
            self.apply_sliding_window_attention = windowed
            self._input_pos = None
        return o

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q `[B, H, T, D]`, k `[B, H, S, D]`, v `[B, H, S, Dv]`, key heads repeated or not, to o `[B, T, H, Dv]`.

        Args:
            mask: None means causal. A call on a cache does not read the mask, because `input_pos` holds the same
                information. Otherwise bool, True where a query sees a key, broadcastable to `[B, H, T, S]`.

        Raises:
            ArgumentError: a mask that is not bool, or tokens whose keys overwrote keys that they see in a ring buffer.
            NotRenderedError: the package has no variant of this window, cap or mask.
        """
        cap = self.config.attention_logit_softcapping
        scale = (self.config.attention_scores_scalar or q.shape[-1]) ** -0.5 * self.mscale**2
        repeated = q.shape[1] // self.config.n_query_groups
        if k.shape[1] == q.shape[1] and repeated > 1:
            k, v = k[:, ::repeated], v[:, ::repeated]
        tensors: dict[str, Tensor] = {}
        by_mask = mask is not None and self._input_pos is None
        name, scalars, keep = _variant(self._window, None if cap is None else constant(cap), by_mask)
        if self._input_pos is not None:
            tensors = self._positions(self._input_pos, q, k)
        elif mask is not None:
            if mask.dtype is not torch.bool:
                fail(_TITLE, "mask", "None or bool", str(mask.dtype))
            tensors[keep] = mask.expand(*q.shape[:3], k.shape[2])
        op: Any = getattr(ops, name)
        o: Tensor = op(q, k, v, scale=scale, **dict(scalars), **tensors)
        return o.transpose(1, 2)

    def _positions(self, input_pos: Tensor, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """The positions of the queries and keys of a call on the cache, which is a ring buffer in layers with a window.

        The keys of a decoding step without a window are in order, so an offset of the query is enough.
        """
        rows = input_pos.expand(q.shape[0], -1).to(torch.int32)
        places = torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
        if self._window is not None:
            last, size = rows.amax(1, keepdim=True), self.kv_cache.max_cache_len
            # A full buffer may have dropped keys that the first of several queries sees. litgpt has read `input_pos`.
            if q.shape[2] > 1 and k.shape[2] == size and not torch.compiler.is_compiling():
                lost = (last >= size) & (last - rows.amin(1, keepdim=True) > size - self._window)
                if bool(lost.any()):
                    expected = (
                        f"one token at a time from position {size} on, where the ring buffer of {size} keys is full"
                    )
                    fail(_TITLE, "input_pos", expected, f"{q.shape[2]} tokens up to position {int(last.max())}")
            places = last - (last - places) % size
            # A ring slot that was never written gets a position that no query sees.
            return {"q_positions": rows, "kv_positions": torch.where(places < 0, BEYOND, places)}
        if q.shape[2] == 1:
            return {"q_offset": rows[:, 0]}
        return {"q_positions": rows, "kv_positions": places.expand(q.shape[0], -1)}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, cap: float | None, by_mask: bool) -> tuple[str, tuple[tuple[str, float], ...], str]:
    """The variant's name, scalars and mask tensor. They are constants of a trace, which cannot read `find`'s file."""
    before = None if window is None else window - 1
    found = find(Attention(mask=True, cap=cap) if by_mask else Attention(before=before, after=0, cap=cap))
    return found.name, tuple(found.scalars.items()), found.mask or ""


def use(model: Model) -> Model:
    """Make `CodegenAttention` a base of all attention layers of a litgpt model. The model is changed and returned.

    Weights, caches and the names of parameters stay as they are. `use` serves `litgpt.GPT` and its variants for LoRA
    and adapters. A layer that has the base already stays as it is.

    Raises:
        ArgumentError: a module without an attention layer of litgpt.
    """
    from litgpt.model import CausalSelfAttention, MultiheadLatentAttention

    layers = [x for x in model.modules() if isinstance(x, CausalSelfAttention | MultiheadLatentAttention)]
    if not layers:
        fail(_TITLE, "model", "a model of litgpt, with CausalSelfAttention", type(model).__name__)
    for layer in layers:
        own = type(layer)
        if not issubclass(own, CodegenAttention):
            layer.__class__ = type(f"Codegen{own.__name__}", (CodegenAttention, own), {"__module__": own.__module__})
    return model
