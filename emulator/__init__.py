"""Gluon's kernels for Hopper, run on the CPU: an emulation of the part of the language that they use.

Gluon has no interpreter. Here a kernel's own Python source is executed, each function as it stands, with names of
`triton` that compute on torch tensors: `values` has scalars, blocks, pointers and layouts, `assembly` and `ptx` inline
PTX, `tiles` shared memory, TMA and wgmma, `barriers` the mbarriers, `partitions` the warps that run side by side, and
`device` a program, which has all of these. Programs run one after the other.

    path = Path("generated/causal/hopper_fwd.py")
    kernel = Kernel(path.read_text(), "causal_hopper_fwd", Timing.LATE_PRODUCTS, device_sources(path))
    kernel[grid](*arguments, **constants)

It raises an error where a kernel

- accesses what is not in its tensors, or combines blocks of different layouts;
- reads a tile without having waited for its copy, or copies to one without having waited for its readers, whatever the
  order in which the partitions happen to run here;
- uses sums without having waited for their wgmma;
- arrives too often at a barrier, or waits for what never comes.

It knows nothing of time, registers, the memory model beside mbarriers, or which layouts the compiler can lower.
"""

from .device import Timing
from .errors import EmulationError
from .kernel import Kernel, device_sources
from .partitions import DeadlockError

__all__ = ["DeadlockError", "EmulationError", "Kernel", "Timing", "device_sources"]
