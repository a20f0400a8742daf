"""Finds the specialised kernels that calls launch, and compiles them in worker processes.

A kernel is compiled once, however many calls launch it: Triton's key of a specialisation tells whether two are equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver as nvidia

from codegen.arch.chips import CHIPS
from codegen.compile.offline import Compiled, compile_launches
from codegen.compile.packages import Package, imported
from codegen.spec.model import Variant
from codegen.warm.calls import Target, WarmCall, run_call


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel specialised for the arguments of a launch: its module and name, and Triton's key. `length`: of its
    source."""

    module: str
    name: str
    key: str
    length: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kernel to compile: one of those that `call` launches."""

    package: Package
    target: Target
    call: WarmCall
    variant: Variant | None
    kernel: Kernel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of compiling a kernel: the seconds it took, its launcher included; `found`: it was in the cache."""

    seconds: float
    found: bool


def kernels_of(call: WarmCall, target: Target, package: Package, variant: Variant | None) -> list[Kernel]:
    """The kernels that a call launches, each once; nothing is compiled."""
    seen: dict[Kernel, None] = {}

    def refuse(kernel: Kernel) -> bool:
        seen[kernel] = None
        return True

    with _refusing(refuse):
        _launch(call, target, package, variant)
    return list(seen)


def tasks(
    calls: Sequence[tuple[WarmCall, Variant | None]],
    target: Target,
    package: Package,
    fail: Callable[[WarmCall, Exception], None],
) -> list[Task]:
    """The kernels of calls, each once, those with long sources first because they take the longest. A call that its op
    refuses is passed to `fail`."""
    found: dict[Kernel, Task] = {}
    for call, variant in calls:
        try:
            kernels = kernels_of(call, target, package, variant)
        except Exception as error:  # whatever an op raises; the other calls are compiled
            fail(call, error)
            continue
        for kernel in kernels:
            task = Task(package=package, target=target, call=call, variant=variant, kernel=kernel)
            found.setdefault(kernel, task)
    return sorted(found.values(), key=lambda task: -task.kernel.length)


def compile_task(task: Task) -> Outcome:
    """Compile one kernel into Triton's cache, and if NVIDIA's driver is installed, the C code that launches it."""
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    start = time.perf_counter()
    try:
        imported(Path(task.package.root) / task.package.name)
        with _refusing(lambda kernel: kernel != task.kernel):
            compiled = _launch(task.call, task.target, task.package, task.variant)
        if not hits:
            raise RuntimeError("the call did not launch it a second time")
        if task.kernel.name in compiled and CHIPS[task.target.arch].is_nvidia:
            _build_launcher(compiled[task.kernel.name])
    finally:
        knobs.compilation.listener = before
    return Outcome(seconds=time.perf_counter() - start, found=all(hits))


def has_launchers(target: Target) -> bool:
    """Whether the C code that launches kernels can be compiled here: it is linked with the GPU driver's library."""
    if not CHIPS[target.arch].is_nvidia:
        return False
    try:
        return bool(nvidia.libcuda_dirs())
    except Exception:  # an assertion, or a system without ldconfig
        return False


def _build_launcher(kernel: Compiled) -> None:
    """Do what `CompiledKernel` does at its first launch, except loading the machine code onto the GPU."""
    if not has_launchers(Target(arch=f"sm_{kernel.metadata.target.arch}", gpu="")):
        return
    nvidia.CudaUtils()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _launch(call: WarmCall, target: Target, package: Package, variant: Variant | None) -> dict[str, Compiled]:
    return compile_launches(
        lambda: run_call(call, package, variant), call.variant, target.arch, package.name, gpu=target.gpu
    )


@contextmanager
def _refusing(refuses: Callable[[Kernel], bool]) -> Iterator[None]:
    """Inside, kernels for which `refuses` is true are not compiled: Triton asks before it compiles one."""

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        source: str = fn.jit_function.src
        return refuses(Kernel(module=fn.module, name=fn.name, key=key, length=len(source)))

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
