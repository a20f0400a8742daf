# SPDX-License-Identifier: Apache-2.0
"""The random words of dropout in plain torch, the same as the kernels draw.

Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a function of a key and a
counter: any element of a mask can be drawn alone, again, and in any order. Seven rounds are the fewest that pass
BigCrush there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.checks import keep_numbers

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and lower word of the product of two words; with one factor in halves, nothing passes 63 bits."""
    lower = x * (factor & 0xFFFF)
    upper = x * (factor >> 16) + (lower >> 16)
    return upper >> 16, (upper << 16 | lower & 0xFFFF) & _WORD


def philox4x32(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter, as `triton.language.philox` gives them in 7 rounds.

    `seed` is the 64-bit key. Counters and results are words in int64 tensors; the counters broadcast.
    """
    key = torch.full((), seed, dtype=torch.int64, device=c0.device)
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        upper_0, lower_0 = _product(c0, _MULTIPLIERS[0])
        upper_2, lower_2 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = upper_2 ^ c1 ^ k0, lower_2, upper_0 ^ c3 ^ k1, lower_0
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def dropout_words(
    seed: int,
    shape: Sequence[int],
    device: torch.device,
    *,
    row_offset: int | Tensor = 0,
    first_head: int = 0,
    all_heads: int = 0,
    key_offset: int = 0,
) -> Tensor:
    """The word of each probability of `shape` `[B, H, Sq, Skv]`, int64: it is dropped if that is below a threshold.

    One evaluation of Philox gives four words, which are 16 bytes for 16 probabilities. Bit 4 of the key's index and bit
    3 of the row's index select one of the four words; bits 0 and 3 of the key's index select a byte in it. In both
    selections the first bit named is the more significant one. That byte is the upper byte of the probability's word.
    The lower bytes are those of the exclusive or of the four words, which all 16 share: any two of the 16 words still
    have independent bytes, and each is below a threshold with the exact probability.

    The counter is (key, row, first_head + batch row * all_heads + head, 0), where key and row are the other bits of
    both indices without gaps, and 0 for `all_heads` stands for H. Rows are counted from `row_offset` on, a number or
    `[B or 1, 1, 1, 1]`, rounded down to a multiple of 16, so that the 16 probabilities stay in one tile. Keys are
    counted from `key_offset` on, a multiple of 32.
    """
    batch, heads, q_len, kv_len = shape
    row_blocks, key_blocks = -(-q_len // 16), -(-kv_len // 32)
    row_group = torch.arange(row_blocks * 8, device=device)[:, None]
    key_group = torch.arange(key_blocks * 4, device=device) + key_offset // 8
    numbers = first_head + (all_heads or heads) * torch.arange(batch, device=device)[:, None]
    head = (numbers + torch.arange(heads, device=device)).view(-1, 1, 1)
    first_group = row_offset // 16 * 8
    if isinstance(first_group, Tensor):
        first_group = first_group.view(-1, 1).expand(batch, heads).reshape(-1, 1, 1)
    row_group = (row_group + first_group) & _WORD
    four = torch.stack(philox4x32(seed, key_group, row_group, head, torch.zeros_like(head)))
    shared = (four[0] ^ four[1] ^ four[2] ^ four[3]) >> 8
    places = torch.arange(4, device=device) * 8
    words = (four[..., None] >> places & 0xFF) << 24 | shared[..., None]
    # [key's bit 4, row's bit 3, B * H, row block, row, key block, key, key's bits 0 and 3]: each bit goes to its place.
    words = words.view(2, 2, batch * heads, row_blocks, 8, key_blocks, 4, 2, 2).permute(2, 3, 1, 4, 5, 0, 8, 6, 7)
    return words.reshape(batch, heads, row_blocks * 16, key_blocks * 32)[:, :, :q_len, :kv_len]


def dropout(
    probs: Tensor,
    dropout_p: float,
    seed: int,
    row_offset: int | Tensor = 0,
    first_head: int = 0,
    all_heads: int = 0,
    key_offset: int = 0,
) -> Tensor:
    """Probabilities `[B, H, Sq, Skv]`, each set to 0 with probability `dropout_p`, else divided by `1 - dropout_p`."""
    threshold, keep_scale = keep_numbers(dropout_p)
    origin = {"first_head": first_head, "all_heads": all_heads, "key_offset": key_offset}
    words = dropout_words(seed, probs.shape, probs.device, row_offset=row_offset, **origin)
    drop = words < threshold
    return torch.where(drop, 0.0, probs * keep_scale)
