"""Gluon's kernels for Hopper, run on the CPU: an emulation of the part of the language that they use.

Gluon has no interpreter. Here a kernel's own Python source is executed unchanged, with names of `triton` replaced by
functions on torch tensors: `values` has scalars, blocks, pointers and layouts, `assembly` and `ptx` inline PTX, `tiles`
shared memory, TMA and wgmma, `barriers` the mbarriers, `partitions` the groups of warps that run side by side, and
`device` a program, which owns all of these. Programs run one after the other.

    path = Path("generated/causal/hopper_fwd.py")
    kernel = Kernel(path.read_text(), "causal_hopper_fwd", Timing.LATE_PRODUCTS, device_sources(path))
    kernel[grid](*arguments, **constants)

It raises an error if a kernel

- accesses memory outside its tensors, or combines blocks of different layouts;
- reads a tile without having waited for its copy, or copies to a tile without having waited for its readers. This is
  found for any order in which the partitions run here;
- uses accumulators without having waited for their wgmma;
- arrives too often at a barrier, or waits for an arrival or a copy that never comes.

It does not model time, registers, the memory model apart from mbarriers, or which layouts the compiler can lower.
"""

from .device import Timing
from .errors import EmulationError
from .kernel import Kernel, device_sources
from .partitions import DeadlockError

__all__ = ["DeadlockError", "EmulationError", "Kernel", "Timing", "device_sources"]
