"""The chips that kernels are rendered, tuned and checked for: their limits, and the GPUs that carry them.

>>> CHIPS["sm_90"].shared_memory, GPU_CHIPS["h100"]
(232448, 'sm_90')
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One architecture.

    Limits are those of one multiprocessor (a compute unit on AMD), from the CUDA C++ programming guide (table of
    technical specifications), the PTX ISA (tensor memory) and the CDNA 3 instruction set guide.

    Attributes:
        name: as in `archs:` of a spec: `sm_90`, `gfx942`.
        gpus: GPUs with this chip, as `gpu_key` of the generated package spells them.
        shared_memory: bytes that one program may use.
        registers: 32-bit registers, all of which one program may use.
        thread_registers: registers that one thread may use.
        lanes: threads of a warp (a wavefront on AMD).
        tensor_columns: columns of tensor memory.
        has_wgmma: True if it has warpgroup MMA beside TMA, on which the kernels of the family `hopper` are built.
        same_tiles_as: the chip whose default tiles this one runs with, because it has the same instructions and no less
            shared memory. Empty for a chip that has tiles of its own.
    """

    name: str
    gpus: tuple[str, ...]
    shared_memory: int
    registers: int = 65_536
    thread_registers: int = 255
    lanes: int = 32
    tensor_columns: int = 0
    has_wgmma: bool = False
    same_tiles_as: str = ""

    @property
    def is_nvidia(self) -> bool:
        """True for NVIDIA, false for AMD."""
        return self.name.startswith("sm_")


SIMDS = 4
"""Schedulers of a multiprocessor (SIMDs of a compute unit), which share its registers evenly."""

_ALL = (
    Chip(name="sm_80", gpus=("a100",), shared_memory=166_912),
    Chip(name="sm_86", gpus=("a10",), shared_memory=101_376, same_tiles_as="sm_89"),
    Chip(name="sm_87", gpus=(), shared_memory=166_912, same_tiles_as="sm_80"),
    Chip(name="sm_89", gpus=("l4", "l40s", "rtx_4090"), shared_memory=101_376),
    Chip(
        name="sm_90",
        gpus=("h100", "h100_pcie", "h100_nvl", "h200", "gh200", "h800", "h20"),
        shared_memory=232_448,
        has_wgmma=True,
    ),
    Chip(name="sm_100", gpus=("b200", "gb200"), shared_memory=232_448, tensor_columns=512),
    Chip(
        name="sm_103",
        gpus=("b300", "gb300"),
        shared_memory=232_448,
        tensor_columns=512,
        same_tiles_as="sm_100",
    ),
    Chip(name="sm_120", gpus=("rtx_5090",), shared_memory=101_376),
    Chip(name="sm_121", gpus=("gb10",), shared_memory=101_376, same_tiles_as="sm_120"),
    Chip(
        name="gfx942",
        gpus=("mi300x",),
        shared_memory=65_536,
        registers=131_072,
        thread_registers=512,
        lanes=64,
    ),
)

CHIPS = {chip.name: chip for chip in _ALL}
"""Name -> chip."""

ARCHS = tuple(chip.name for chip in _ALL if not chip.same_tiles_as)
"""Chips that a spec has tiles for."""

SAME_TILES = {chip.name: chip.same_tiles_as for chip in _ALL if chip.same_tiles_as}
"""Chip without tiles of its own -> the chip whose tiles it runs with."""

GPU_CHIPS = {gpu: chip.name for chip in _ALL for gpu in chip.gpus}
"""GPU -> its chip."""

(HOPPER,) = (chip for chip in _ALL if chip.has_wgmma)
"""The chip that the family `hopper` is written for."""

DEFAULT_MULTIPROCESSORS = 132
"""Multiprocessors to plan for when kernels are compiled without a GPU: those of an H100."""
