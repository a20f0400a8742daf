# SPDX-License-Identifier: Apache-2.0
"""The device of a call: its architecture, the features of that architecture, and the tiles of the call's kernels."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..archs import DEFAULT_MULTIPROCESSORS, HOPPER_FAMILY
from ..core.configs import INTERPRETER, Tiles, tiles_for
from ..core.options import CallOptions, checked_options
from ..core.paged_tiles import PagedConfig, PagedTiles, paged_tiles
from ..core.settings import INTERPRET
from ..core.tiles import MaskSizes
from ..core.tuned import gpu_key
from ..kernels import TRAITS
from .dtypes import DTYPE_NAMES


def _index_of(x: Tensor) -> int:
    """The index of a tensor's GPU; that of the current GPU for a meta tensor, of a call that is only compiled."""
    return torch.cuda.current_device() if x.device.index is None else x.device.index


@cache
def _device_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch_of(x: Tensor) -> str:
    """The architecture a tensor's kernels are compiled for."""
    return INTERPRETER if x.device.type == "cpu" else _device_arch(_index_of(x))


@cache
def _device_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(x: Tensor) -> int:
    """The number of multiprocessors of a tensor's GPU; for a tensor on the CPU that of an H100."""
    return DEFAULT_MULTIPROCESSORS if x.device.type == "cpu" else _device_multiprocessors(_index_of(x))


@cache
def _device_gpu(index: int) -> str:
    return gpu_key(torch.cuda.get_device_name(index))


def gpu_of(x: Tensor) -> str:
    """The folder of the tuned tiles of a tensor's GPU, such as h100; "" on a CPU."""
    return "" if x.device.type == "cpu" else _device_gpu(_index_of(x))


def interprets(x: Tensor) -> bool:
    """Whether kernels run in Triton's interpreter, which cannot run those of Hopper's family."""
    return INTERPRET and arch_of(x) == INTERPRETER


def is_nvidia(x: Tensor) -> bool:
    """Whether a tensor's kernels may hold PTX."""
    return arch_of(x).startswith("sm_")


def has_tanh_instruction(x: Tensor) -> bool:
    """Whether tanh is one instruction, exact enough for 16-bit inputs: on NVIDIA chips."""
    return x.element_size() <= 2 and is_nvidia(x)


def overlaps(x: Tensor) -> bool:
    """Whether a kernel can start before the previous one ends, and then wait for it: on NVIDIA chips from Hopper on."""
    arch = arch_of(x)
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def copies_by_tma(x: Tensor) -> bool:
    """Whether kernels of Hopper's family can copy a tensor: on sm_90, from memory at a multiple of 16 bytes."""
    return arch_of(x) == HOPPER_FAMILY.arch and x.data_ptr() % 16 == 0


def call_options(
    op: str,
    config: Any,
    family: Any,
    deterministic: Any,
    mode: str = "dense",
    lengths: tuple[Any, Any] = (None, None),
) -> CallOptions:
    """What a call of this mode asks of its kernels.

    If torch's deterministic algorithms are on, gradients are by default added in a fixed order, where the mode can.
    """
    if deterministic is None and torch.are_deterministic_algorithms_enabled():
        deterministic = mode not in TRAITS[op].atomic_modes
    return checked_options(op, config, family, deterministic, mode, lengths)


def call_tiles(op: str, mode: str, q: Tensor, v: Tensor, length: int, options: CallOptions, sizes: MaskSizes) -> Tiles:
    """The tiles of each pass of a call. `length`: keys of a sequence, or their average if sequences are packed."""
    dims, heads = (q.shape[3], v.shape[3]), (q.shape[1], v.shape[1])
    return tiles_for(
        op, mode, arch_of(q), gpu_of(q), str(q.dtype).removeprefix("torch."), dims, heads, length, options, sizes
    )


def paged_call_tiles(op: str, q: Tensor, k: Tensor, group: int, config: PagedConfig) -> PagedTiles:
    """The tiles of a call on paged caches `k`."""
    dtypes = DTYPE_NAMES.get(q.dtype, str(q.dtype)), str(k.dtype).removeprefix("torch.")
    return paged_tiles(op, arch_of(q), gpu_of(q), *dtypes, q.shape[-1], group, config)
