# SPDX-License-Identifier: Apache-2.0
"""Copies between tensors, by words of 8 bytes if both are made of them: fewer elements than of 16 bits."""

import torch
from torch import Tensor

_WORD = torch.int64


def copy_words(target: Tensor, source: Tensor) -> None:
    """Copy a tensor, or round it to another dtype."""
    if target.dtype == source.dtype and _has_words(target) and _has_words(source):
        target, source = target.view(_WORD), source.view(_WORD)
    target.copy_(source)


def _has_words(x: Tensor) -> bool:
    count = _WORD.itemsize // x.element_size()
    if x.dim() == 0 or x.stride(-1) != 1 or x.shape[-1] % count or x.storage_offset() % count:
        return False
    return all(stride % count == 0 for stride in x.stride()[:-1])
