# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels by Triton, their scratch memory, and what is needed to launch a compiled kernel again."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..core.compiling import COMPILER_OPTIONS, hash_kernel
from ..core.settings import DEBUG, HAS_TRITON, INTERPRET, INTERPRETER

# Replay is enabled for these versions, in which a compiled kernel is run with the same arguments. AMD's kernels are
# also specialised on the size of a tensor's memory, which the key of a call does not contain. In debug mode each call
# checks its own values.
ENABLED = (
    HAS_TRITON
    and not INTERPRET
    and not DEBUG
    and torch.version.hip is None
    and version("triton").startswith(("3.6.", "3.7.", "3.8.", "3.9."))
)

if HAS_TRITON:
    from triton import knobs
    from triton.runtime import _allocation

# In Triton 3.6 the launcher of a compiled kernel allocates memory and passes it on between other arguments. Launchers
# of later versions are called as they are.
_KNOWN_LAUNCHER = (
    ("triton.backends.nvidia.driver", "CudaLauncher") if ENABLED and version("triton")[:4] == "3.6." else None
)


class Active(threading.local):
    """What `launch` has to do in a thread besides launching, or in its place."""

    recording: Any = None
    """The `Recording` that notes the current call, if any."""
    compiles: Callable[[Any, tuple[int], Sequence[Any], dict[str, Any]], None] | None = None
    """If set, it receives the kernel, grid, arguments and constants of each launch, and nothing is launched."""


active = Active()


def is_recording() -> bool:
    """Whether a call is being recorded, for which one dispatch mode is on."""
    return active.recording is not None


def _scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Scratch memory of a kernel, which may be reused by work that is queued on the stream after it."""
    with _disable_current_modes():
        return torch.empty(size, dtype=torch.int8, device="cuda")


@contextmanager
def giving_scratch() -> Iterator[None]:
    """Kernels that build TMA descriptors get memory for them from torch, whatever allocator Triton has."""
    token = _allocation._allocator.set(_scratch)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def launch_hopper(kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None:
    """`launch` of a kernel of Hopper's family."""
    with giving_scratch():
        launch(kernel, grid, *groups, **constants)


def launch(kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the device of the tensors; `args` are those of all groups."""
    args = tuple([x for group in groups for x in group])
    constants |= COMPILER_OPTIONS
    if active.compiles is not None:
        active.compiles(kernel, grid, args, constants)
        return
    hash_kernel(kernel)
    device = next(x.device for x in args if isinstance(x, Tensor))
    with INTERPRETER if INTERPRET else _current(device):
        compiled = kernel[grid](*args, **constants)
    if active.recording is not None:
        active.recording.note(kernel, compiled, grid, args, constants)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the device is the one that Triton launches on. Tensors of the CPU are given only to be compiled for."""
    is_current = device.type == "cpu" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def launcher_of(compiled: Any, grid: tuple[int]) -> tuple[Callable[..., object], list[Any], int]:
    """What launches a compiled kernel, its arguments before the kernel's own, and the bytes of scratch memory.

    The scratch memory has a place among these arguments. Its size is 0 if the launcher allocates the memory itself.
    """
    run = compiled.run
    if (type(run).__module__, type(run).__name__) == _KNOWN_LAUNCHER and run.profile_scratch_size == 0:
        # As `CudaLauncher.__call__` does, but without allocating memory.
        flags = run.launch_cooperative_grid, run.launch_pdl
        ahead = [*grid, 1, 1, None, compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None]
        return run.launch, ahead, grid[0] * run.num_ctas * run.global_scratch_size
    # As at the end of `JITFunction.run`, but without hooks.
    return run, [*grid, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None], 0


def current_stream(device: int) -> int:
    """The current stream, as Triton takes it."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_seen_by_others() -> bool:
    """Whether a trace, a dispatch mode or a transform of `torch.func` sees what a call does."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def launches_are_watched() -> bool:
    """Whether somebody, such as a profiler, asked Triton to do more than to launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )
