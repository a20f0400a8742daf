"""The JAX implementation of the protocol `Backend` of `runtime/core/launches.py`."""

from .kernels import call_tiles as call_tiles
from .kernels import copies_by_tma as copies_by_tma
from .kernels import has_tanh_instruction as has_tanh_instruction
from .kernels import is_loaded as is_loaded
from .kernels import is_nvidia as is_nvidia
from .kernels import launch as launch
from .kernels import multiprocessors as multiprocessors
from .kernels import overlaps as overlaps
from .schedule import block_sequences as block_sequences
from .schedule import list_blocks as list_blocks
from .schedule import work_counter as work_counter
from .tensor import BF16 as BF16
from .tensor import FP32 as FP32
from .tensor import INT32 as INT32
from .tensor import aligned as aligned
from .tensor import begin_alike as begin_alike
from .tensor import empty_by_tokens as empty_by_tokens
from .tensor import empty_like_layout as empty_like_layout
from .tensor import fill_in_parts as fill_in_parts
from .tensor import has_even_rows as has_even_rows
from .tensor import int64 as int64

launch_hopper = launch
ANSWERS_DISORDER = False
"""The code around the launches checks the order of positions, so that no kernel has to."""
