"""Which probabilities a dropout keeps, written again from its definition.

Philox4x32-7 is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, on words in int64. The
counter is (key, row, batch row times heads plus head, 0): the row without its bit 3, and the key without its bits 0, 3
and 4, closed up. Bit 4 of the key and bit 3 of the row say which of the four words has a byte for the pair, bits 0 and
3 of the key which of its bytes. The pair's own word is that byte and, below it, the upper three bytes of the exclusive
or of the four words. Rows are counted from the query offset on, rounded down to a multiple of 16; below 0 they are
words as two's complements.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def kept_factor(dropout_p: float, seed: int, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """0 where a pair is dropped, else what leaves the mean as it was; float64. `head` counts through the batch."""
    threshold = min(round(dropout_p * 2**32), 2**32 - 1)
    counter = ((key >> 5) * 4 + (key >> 1) % 4, ((row >> 4) * 8 + row % 8) & MASK, head, torch.zeros_like(head))
    a, b, c, d = words = _philox(seed, *counter)
    which = (key >> 4) % 2 * 2 + (row >> 3) % 2
    byte = torch.stack(words).gather(0, which[None])[0] >> 8 * (key % 2 * 2 + (key >> 3) % 2) & 0xFF
    word = byte << 24 | (a ^ b ^ c ^ d) >> 8
    return (word >= threshold).double() * (2**32 / (2**32 - threshold))


def _philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = counter
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(7):
        (a_high, a_low), (c_high, c_low) = _wide(a, 0xD2511F53), _wide(c, 0xCD9E8D57)
        a, b, c, d = c_high ^ b ^ key[0], c_low, a_high ^ d ^ key[1], a_low
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return a, b, c, d


def _wide(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The two words of a product, from products of 32 by 16 bits, which int64 holds."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
