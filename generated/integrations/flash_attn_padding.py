# SPDX-License-Identifier: Apache-2.0
"""`flash_attn.bert_padding`: packs the rows of a batch without their padding, and unpacks them.

>>> import torch
>>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
>>> x = torch.arange(6.0).view(2, 3, 1)
>>> packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
>>> packed[:, 0].tolist(), indices.tolist(), cu_seqlens.tolist(), longest
([0.0, 1.0, 3.0], [0, 1, 3], [0, 2, 3], 2)
>>> pad_input(packed, indices, 2, 3)[:, :, 0].tolist()
[[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]

All have gradients. Those that return the longest length wait for the device, as the originals do.
"""

import torch
from torch import Tensor

from .._runtime.core.checks import fail

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # the argument's name is flash_attn's
    """The rows `indices` of a tensor `[rows, ...]`."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # the name is flash_attn's
    """The rows `indices` of a tensor `[rows, ...]`, and the tensor itself for a residual connection."""
    return input.index_select(0, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of `first_axis_dim` rows: `values` at the rows `indices`, 0 in all other rows."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Unpadded:
    """The real tokens of a batch.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask: bool or integers `[B, S]`, true where a token is real.
        unused_mask: the same, true where room is kept in the packed tensor for a token that is not used.

    Returns:
        The tokens that either mask marks `[total, ...]`; their indices in `[B * S, ...]`; where sequences begin, int32
        `[B + 1]`; the most tokens of a sequence; and the number of real tokens of each sequence, int32 `[B]`.
    """
    _check_mask("unpad_input", "attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unpad_input", "unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _begins(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several sequences, one after the other, and then padding.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask_in_length: integers `[B, S]`: the lengths of a row's sequences, then zeros.

    Returns:
        The tokens `[total, ...]`, their indices in `[B * S, ...]`, where sequences begin, int32 `[n + 1]`, and the
        length of the longest sequence.
    """
    title = "unpad_input_for_concatenated_sequences"
    _check_mask(title, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    places = torch.arange(hidden_states.shape[1], device=attention_mask_in_length.device)
    indices = (places < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _begins(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: packed tokens `[total, ...]` as `[batch, seqlen, ...]`, 0 where there is none."""
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded


def _begins(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _check_mask(title: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        fail(title, name, f"shape {list(hidden_states.shape[:2])}, that of hidden_states", list(mask.shape))
