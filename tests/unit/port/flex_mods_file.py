"""Masks and scores in the style of FlexAttention users: what `codegen port` reads, and its tests run beside it."""

# ruff: noqa: ARG001 -- FlexAttention gives a mod all of its arguments, whether it reads them or not
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import math
from functools import partial

import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

WINDOW = 64
CANVAS_W = 12
CANVAS_H = 10
KERNEL_SIZE = 3
USE_CAP = True
SOFT_CAP = 20.0


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def generate_sliding_window(window_size: int):
    """The last `window_size` keys."""

    def sliding_window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window_size

    mask_mod = and_masks(sliding_window, causal_mask)
    mask_mod.__name__ = f"sliding_window_{window_size}"
    return mask_mod


def sums_of_booleans(b, h, q_idx, kv_idx):
    either = (q_idx >= kv_idx) + (kv_idx < 4)
    return ~(either * (kv_idx > 1)) | (either == kv_idx % 2)


def given_dtypes(b, h, q_idx, kv_idx):
    halves = (q_idx / 2).to(q_idx.dtype) >= kv_idx - torch.tensor(3.7, dtype=torch.int32)
    return halves & ((q_idx - kv_idx) * torch.full((), 2.5, dtype=torch.int64) < 17 + torch.full_like(kv_idx, 1.5))


def generate_prefix_lm_mask(prefix_length: int = 24):
    def prefix_mask(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length

    return or_masks(prefix_mask, causal_mask)


def make_document_mask(document_id: torch.Tensor):
    def document_mask(b, h, q_idx, kv_idx):
        same_document = document_id[b, q_idx] == document_id[b, kv_idx]
        return same_document & causal_mask(b, h, q_idx, kv_idx)

    return document_mask


def _offsets_to_document(offsets):
    counts = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)


def generate_packed_causal(offsets: torch.Tensor):
    document = _offsets_to_document(offsets)

    def mask_mod(b, h, q_idx, kv_idx):
        q_logical = q_idx - offsets[document[q_idx]]
        kv_logical = kv_idx - offsets[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & causal_mask(b, h, q_logical, kv_logical)

    return mask_mod


def generate_alibi_bias(H: int):
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / H))
        bias = (kv_idx - q_idx) * scale
        return score + bias

    return alibi_mod


def make_alibi_with_slopes(slopes):
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q).abs()


def generate_tanh_softcap(soft_cap: float):
    def tanh_softcap(score, b, h, q_idx, kv_idx):
        score = score / soft_cap
        score = torch.tanh(score)
        score = score * soft_cap
        return score

    return tanh_softcap


def capped(score, b, h, q_idx, kv_idx):
    if USE_CAP:
        return SOFT_CAP * torch.tanh(score / SOFT_CAP)
    return score


def make_relative_bias(relative_bias, most: int):
    def score_mod(score, b, h, q_idx, kv_idx):
        distance = torch.clamp(q_idx - kv_idx, min=0, max=most)
        return score + relative_bias[h, distance]

    return score_mod


def _place(idx):
    return idx // CANVAS_W, idx % CANVAS_W


def natten_mask(b, h, q_idx, kv_idx):
    q_y, q_x = q_idx // CANVAS_W, q_idx % CANVAS_W
    kv_y, kv_x = _place(kv_idx)
    half = KERNEL_SIZE // 2
    center_x = q_x.clamp(half, (CANVAS_W - 1) - half)
    center_y = torch.clamp(q_y, half, CANVAS_H - 1 - half)
    horizontal = (center_x - kv_x).abs() <= half
    vertical = torch.abs(center_y - kv_y) <= half
    return horizontal & vertical


def generate_dilated_sliding_window(window_size: int, dilation: int):
    def dilated(b, h, q_idx, kv_idx):
        diff = torch.abs(q_idx - kv_idx)
        in_window = diff <= window_size
        is_dilated = (diff % dilation) == 0
        return in_window & is_dilated

    return dilated


def causal_with_padding(lengths):
    def padding(b, h, q_idx, kv_idx):
        return (kv_idx < lengths[b]) & (q_idx < lengths[b])

    return and_masks(causal_mask, padding)


def scaled(score, b, h, q_idx, kv_idx):
    return score * (1 / math.sqrt(8)) * 2**0.5


class GptOssAttention(torch.nn.Module):
    def __init__(self, sliding_window):
        super().__init__()
        self.sliding_window = sliding_window

    def masks(self):
        def gpt_oss_window(b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) & (q_idx - kv_idx < self.sliding_window)

        return gpt_oss_window


fixed_window = generate_sliding_window(WINDOW)
everything = noop_mask
not_self = lambda b, h, q_idx, kv_idx: ~(q_idx == kv_idx)  # noqa: E731


def hidden_by_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def dropped_heads(score, b, h, q_idx, kv_idx):
    return score.masked_fill((h % 2 == 0) | (kv_idx.float() / 2 > 20), float("-inf"))


def _windowed(b, h, q_idx, kv_idx, size):
    return (q_idx - kv_idx < size) & (q_idx >= kv_idx)


partial_window = partial(_windowed, size=7)


def odd_functions(score, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).abs().to(torch.float32)
    score += torch.log1p(distance) * (q_idx > kv_idx)
    far = torch.div(distance, 16, rounding_mode="floor")
    near = torch.minimum(distance, torch.tensor(3.0)) // 2 + (kv_idx / 4) % 1.5
    return score - 3 ** (-far) + near.int() * torch.sign(kv_idx - q_idx) + torch.rsqrt(1 + distance) * distance**2 / 900


def make_seen(seen, tree):
    def mask_mod(b, h, q_idx, kv_idx):
        return seen[b, q_idx, kv_idx] | (tree[q_idx] & tree[kv_idx]).logical_not()

    return mask_mod


def swapped_bits(b, h, q_idx, kv_idx):
    q_idx, kv_idx = kv_idx, q_idx
    q_idx = later = q_idx + 5
    return ((q_idx & 12) == (kv_idx | 4)) | (later <= kv_idx)


def forward(q, k, v):
    block_mask = create_block_mask(causal_mask, None, None, 64, 64)
    return flex_attention(q, k, v, score_mod=capped, block_mask=block_mask)
