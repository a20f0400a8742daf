# SPDX-License-Identifier: Apache-2.0
"""What launches need of PyTorch: an implementation of the `Backend` of `runtime/core/launches.py`."""

import torch

from .devices import call_tiles as call_tiles
from .devices import copies_by_tma as copies_by_tma
from .devices import has_tanh_instruction as has_tanh_instruction
from .devices import is_nvidia as is_nvidia
from .devices import multiprocessors as multiprocessors
from .devices import overlaps as overlaps
from .dtypes import FP32 as FP32
from .launching import launch as launch
from .launching import launch_hopper as launch_hopper
from .schedule import block_sequences as block_sequences
from .schedule import list_blocks as list_blocks
from .schedule import work_counter as work_counter
from .strides import aligned as aligned
from .strides import begin_alike as begin_alike
from .strides import empty_by_tokens as empty_by_tokens
from .strides import empty_like_layout as empty_like_layout
from .strides import has_even_rows as has_even_rows

INT32 = torch.int32
BF16 = torch.bfloat16
ANSWERS_DISORDER = True


def int64() -> torch.dtype:
    """The type of wide integers."""
    return torch.int64


def fill_in_parts(*_tensors: torch.Tensor) -> None:
    """Declare that several launches fill the tensors. PyTorch need not know: each launch writes to their memory."""


def is_loaded(*_scalars: float) -> bool:
    """Whether a call's scalars are tensors that kernels load: in PyTorch they are numbers."""
    return False
