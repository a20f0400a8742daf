"""`generated.integrations.litgpt` on a stand-in of litgpt's attention layer: how it calls the method that the base
class computes, and the attributes around it. `test_litgpt.py` has the same on litgpt itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import ArgumentError
from generated.integrations.litgpt import CodegenAttention, use
from generated.integrations.variants import NotRenderedError

B, T, H, D, W = 2, 20, 4, 16, 6
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
"""float32: sums of at most 64 terms around 1, rounded in another order."""


class Cache(torch.nn.Module):
    """Keys and values by position, or for a window in a ring. Of a ring only the part written so far is returned."""

    def __init__(self, heads: int, length: int, ring: bool) -> None:
        super().__init__()
        self.max_cache_len, self.ring = length, ring
        self.k, self.v = torch.zeros(2, B, heads, length, D)

    def forward(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k[:, :, input_pos % self.max_cache_len] = k
        self.v[:, :, input_pos % self.max_cache_len] = v
        end = min(int(input_pos.max()) + 1, self.max_cache_len) if self.ring else self.max_cache_len
        return self.k[:, :, :end], self.v[:, :, :end]


class CausalSelfAttention(torch.nn.Module):
    """litgpt's layer without rotary embeddings and norms."""

    def __init__(self, config: Any, windowed: bool) -> None:
        super().__init__()
        self.config, self.mscale, self.apply_sliding_window_attention = config, 1.1, windowed
        self.qkv = torch.nn.Linear(H * D, (H + 2 * config.n_query_groups) * D)
        self.kv_cache: Cache | None = None

    def forward(
        self,
        x: Tensor,
        cos: Any,  # noqa: ARG002 - the arguments are litgpt's
        sin: Any,  # noqa: ARG002
        mask: Tensor | None = None,
        input_pos: Tensor | None = None,
        input_pos_maxp1: int | None = None,
    ) -> Tensor:
        groups, length = self.config.n_query_groups, x.shape[1]
        heads = self.qkv(x).view(B, length, -1, D).transpose(1, 2)
        q, k, v = heads.split((H, groups, groups), 1)
        if input_pos is not None:
            assert self.kv_cache is not None
            k, v = self.kv_cache(input_pos, k, v)
            if self.apply_sliding_window_attention and mask is not None:
                mask = mask[..., : k.shape[2]]
            k, v = k[:, :, :input_pos_maxp1], v[:, :, :input_pos_maxp1]
        if groups != H and (input_pos is None or groups != 1):
            k, v = (each.repeat_interleave(H // groups, 1) for each in (k, v))
        if self.apply_sliding_window_attention and input_pos is None:
            distance = torch.arange(length)[:, None] - torch.arange(length)
            mask = torch.where((distance >= 0) & (distance < self.config.sliding_window_size), 0.0, float("-inf"))
        o: Tensor = self.scaled_dot_product_attention(q, k, v, mask).reshape(B, length, H * D)
        return o

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT * (self.config.attention_scores_scalar or D) ** -0.5 * self.mscale**2
        if (cap := self.config.attention_logit_softcapping) is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        o: Tensor = (scores.softmax(-1) @ v).transpose(1, 2)
        return o


@pytest.fixture(autouse=True)
def litgpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `litgpt.model` with the layer of this file in place of litgpt's."""
    package, model = ModuleType("litgpt"), ModuleType("litgpt.model")
    latent = type("MultiheadLatentAttention", (torch.nn.Module,), {})
    model.__dict__.update(CausalSelfAttention=CausalSelfAttention, MultiheadLatentAttention=latent)
    monkeypatch.setitem(sys.modules, "litgpt", package)
    monkeypatch.setitem(sys.modules, "litgpt.model", model)


def pair(groups: int, windowed: bool, cap: float | None) -> tuple[CausalSelfAttention, Any]:
    torch.manual_seed(0)
    config = SimpleNamespace(
        n_query_groups=groups,
        sliding_window_size=W,
        attention_logit_softcapping=cap,
        attention_scores_scalar=None if cap is None else 20,
    )
    own, ours = CausalSelfAttention(config, windowed), CausalSelfAttention(config, windowed)
    own.qkv.weight.data *= 4
    ours.load_state_dict(own.state_dict())
    return own, use(ours)


KINDS = [(4, False, None), (2, True, None), (1, False, 2.0), (2, True, 2.0)]


@pytest.mark.parametrize(("groups", "windowed", "cap"), KINDS)
def test_results_and_gradients(groups: int, windowed: bool, cap: float | None) -> None:
    own, ours = pair(groups, windowed, cap)
    x = torch.randn(B, T, H * D)
    results = [layer(x, None, None) for layer in (own, ours)]
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    weights = torch.randn_like(x)
    gradients = [
        torch.autograd.grad((o * weights).sum(), layer.qkv.weight)[0]
        for o, layer in zip(results, (own, ours), strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert ours.apply_sliding_window_attention is windowed


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(("groups", "windowed", "cap"), KINDS)
def test_a_cache(groups: int, windowed: bool, cap: float | None, sliced: bool) -> None:
    own, ours = pair(groups, windowed, cap)
    x, whole = torch.randn(B, T, H * D), torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    ours.kv_cache = Cache(groups, W if windowed else T, windowed)
    got = []
    with torch.no_grad():
        for begin, end in [(0, 5), (5, 6), *((i, i + 1) for i in range(6, T))]:
            positions, last = torch.arange(begin, end), end if sliced else None
            got.append(ours(x[:, begin:end], None, None, whole[:, :, positions, :last], positions, last))
    torch.testing.assert_close(torch.cat(got, 1), own(x, None, None), **CLOSE)


def test_tokens_whose_keys_overwrite_keys_that_they_see_are_refused() -> None:
    _, ours = pair(2, True, None)
    ours.kv_cache = Cache(2, W, True)
    x, mask = torch.randn(B, W + 1, H * D), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        ours(x[:, : W - 1], None, None, mask, torch.arange(W - 1))
        with pytest.raises(ArgumentError, match=r"input_pos: expected one token .* got 2 tokens up to position 6"):
            ours(x[:, W - 1 :], None, None, mask, torch.arange(W - 1, W + 1))


def test_a_mask_of_ones_own() -> None:
    """Adapters call the method with a mask, for a prefix that every query sees."""
    own, ours = pair(2, False, None)
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, 3, D)
    mask = torch.ones(T, 3, dtype=torch.bool)
    mask[:, 1] = False
    k = k[:, ::2].repeat_interleave(2, 1)
    want = own.scaled_dot_product_attention(q, k, k, mask)
    torch.testing.assert_close(ours.scaled_dot_product_attention(q, k, k, mask), want, **CLOSE)


def test_what_is_not_served_is_refused() -> None:
    x = torch.randn(B, H, T, D)
    _, ours = pair(4, False, None)
    with pytest.raises(ArgumentError, match=r"mask: expected None or bool, got torch\.float32"):
        ours.scaled_dot_product_attention(x, x, x, torch.zeros(T, T))
    _, capped = pair(4, False, 2.0)
    with pytest.raises(NotRenderedError, match=r"scores capped at 2\.0, a mask per pair"):
        capped.scaled_dot_product_attention(x, x, x, torch.ones(T, T, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="model: expected a model of litgpt, with CausalSelfAttention, got Linear"):
        use(torch.nn.Linear(2, 2))


def test_use_changes_a_layer_once() -> None:
    _, ours = pair(4, False, None)
    before = type(ours)
    assert before.__bases__ == (CodegenAttention, CausalSelfAttention)
    assert type(use(torch.nn.Sequential(ours))[0]) is before
