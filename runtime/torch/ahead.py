"""Compiles all kernels of a first call and of its backward in parallel, so that the first step takes hardly longer than
the slowest of these compilations.

A separate process does that, because half of Triton's work holds Python's lock. It writes the compiled kernels into
Triton's cache on disk. Meanwhile the caller's process starts Triton's driver. If the separate process fails or cannot
be started, the call compiles the kernels itself and raises the errors that occur.
"""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import compiling
from ..core.compiling import Job, Order
from ..core.settings import HAS_TRITON, INTERPRET
from .launching import active, is_seen_by_others

if HAS_TRITON:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.jit import create_function_from_signature

# If `sys.executable` is another program, such as a frozen application, it cannot be started as Python.
ENABLED = (
    HAS_TRITON
    and not INTERPRET
    and not getattr(sys, "frozen", False)
    and Path(sys.executable or "").name.startswith("python")
)

LIMIT_S = 60.0
"""Seconds after which a process that compiles is killed."""

_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2]).serve()"
)


class Ahead:
    """A process that compiles the kernels that a call and its backward launch."""

    def __init__(self, forward: Callable[[], object], backward: Callable[[], object], device: int) -> None:
        """Returns once the kernels of the call are compiled.

        `forward` and `backward` are run to see which kernels they launch. `device`: the GPU to compile for.
        """
        self._process: subprocess.Popen[bytes] | None = None
        # An error here also occurs in the call, which raises it.
        try:
            with torch.cuda.device(device):
                self._compile(forward, backward, target_of(device))
        except Exception:
            if self._process is not None:
                self._process.kill()

    def wait(self) -> None:
        """Wait until all kernels are compiled."""
        if self._process is None:
            return
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The open pipe told the process that its caller still runs. The process has ended and needs it no longer.
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _compile(self, forward: Callable[[], object], backward: Callable[[], object], target: Any) -> None:
        command = [sys.executable, "-c", _START, json.dumps(sys.path), compiling.__name__]
        # Triton hashes its files and has a C compiler make its driver: neither needs Python's lock for long.
        hashed, started = compiling.begin(compiling.hash_triton), compiling.begin(_start_driver)
        pipe = subprocess.PIPE
        process = self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        assert process.stdout is not None
        (kernels, first), (more, others) = (_jobs_of(launch, target) for launch in (forward, backward))
        process.stdin.write(pickle.dumps(Order(first, others, target, str(knobs.cache.dir))))
        process.stdin.flush()
        for kernel in kernels + more:
            compiling.hash_kernel(kernel)
        hashed()
        process.stdin.write(pickle.dumps(compiling.hash_triton()))
        process.stdin.flush()
        started()
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            # If the process ends early, this returns without a byte.
            process.stdout.read(1)
        finally:
            # An interrupted program would not end before the timer's thread does.
            limit.cancel()


def _start_driver() -> None:
    """Start Triton's driver. If there is none, a launch raises the error."""
    with suppress(Exception):
        _ = driver.active


def _jobs_of(launch: Callable[[], object], target: Any) -> tuple[list[Any], list[Job]]:
    """The kernels that a function launches, and the job that compiles each of them."""
    kernels: list[Any] = []
    jobs: list[Job] = []

    def note(kernel: Any, _grid: tuple[int], args: Sequence[Any], constants: dict[str, Any]) -> None:
        kernels.append(kernel)
        jobs.append(job_of(kernel, args, constants, target))

    active.compiles = note
    try:
        # Code between the launches may fail on tensors without values.
        with suppress(Exception):
            launch()
    finally:
        active.compiles = None
    return kernels, jobs


def target_of(device: int) -> Any:
    """The target that Triton compiles for. On NVIDIA GPUs Triton's driver is not asked: it compiles C code first."""
    if torch.version.hip is not None:
        return driver.active.get_current_target()
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)


def job_of(kernel: Any, args: Sequence[Any], constants: dict[str, Any], target: Any) -> Job:
    """The job that compiles a kernel for a launch with these arguments."""
    backend = make_backend(target)
    asked = constants | {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **asked
    )
    options, signature, found, attributes = kernel._pack_args(backend, asked, bound, specialization, options)
    return Job(
        module=kernel.__module__,
        name=kernel.__name__,
        signature=signature,
        constants=found,
        attributes=attributes,
        options=vars(options),
    )


def without_values(x: Any) -> Any:
    """A meta tensor of the same shape, strides and dtype; lists item by item, and other values as they are."""
    if isinstance(x, list):
        return [without_values(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def compile_backward(kernels: Any, args: Sequence[Any]) -> None:
    """Compile a first call of `Kernels` whose gradients are wanted, and begin to compile its backward.

    `args` are the arguments of its forward.
    """
    given = dict(zip(kernels.parameters, args, strict=True))
    q, v, options = given["q"], given["v"], given["options"]
    if not ENABLED or not _runs_on_gpu(q) or options.plain:
        return
    wanted = [getattr(given[name], "requires_grad", False) for name in kernels.flags]
    kind = q.get_device(), q.dtype, q.shape[-1], v.shape[-1], options.key, *wanted
    if kind in kernels.compiled:
        return
    kernels.compiled.add(kind)
    found = {name: without_values(x) for name, x in given.items()}

    def forward() -> None:
        kernels.forward_kernels(*found.values())

    def backward() -> None:
        results = dict(zip(kernels.results, kernels.fake_forward(*found.values()), strict=True))
        every = found | results | {"do": without_values(results["o"]), "dlse": None}
        every |= dict(zip(kernels.flags.values(), wanted, strict=True))
        kernels.backward_kernels(*(every[name] for name in kernels.backward_parameters))

    kernels.ahead.append(Ahead(forward, backward, q.get_device()))


def _runs_on_gpu(q: Tensor) -> bool:
    """True if a call launches its kernels on a GPU at once, and no CUDA graph is being captured."""
    return q.is_cuda and not is_seen_by_others() and not torch.cuda.is_current_stream_capturing()


def wait_for_backward(kernels: Any) -> None:
    """Wait until the backward of `Kernels` is compiled, if its compilation was begun."""
    while active.compiles is None:
        try:
            ahead = kernels.ahead.pop()
        except IndexError:  # also if another thread has taken the last one
            return
        ahead.wait()
