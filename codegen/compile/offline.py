"""Compiles the kernels that a call launches, for a chip that this machine need not have: real arguments, no launch.

An op is called with CPU tensors while Triton sees a driver of that architecture, so each kernel is specialised for the
arguments that the op really passes. This finds errors that the interpreter cannot, such as a global that is not a
`tl.constexpr`. The results go into Triton's cache on disk, where a process with such a GPU and the same Triton and
Python finds them.

torch and Triton are imported where they are used, because the rest of the generator runs without them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import count
from typing import Any

from codegen import PACKAGE
from codegen.arch.chips import CHIPS
from codegen.util.errors import CodegenError

Compiled = Any
"""Triton's `CompiledKernel`: `asm` has the text of each stage by name, `metadata` for instance `shared`, in bytes."""

OnFailure = Callable[[str, Exception], None]
"""Called with the name of a kernel that did not compile, and with the error."""

_ALONE = threading.Lock()
_NUMBERS = count(-1, -1)


def target_of(arch: str) -> Any:
    """Triton's target for an architecture such as `sm_90` or `gfx942`."""
    from triton.backends.compiler import GPUTarget

    chip = CHIPS[arch]
    if chip.is_nvidia:
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), chip.lanes)
    return GPUTarget("hip", arch, chip.lanes)


def compile_launches(
    call: Callable[[], object],
    variant: str,
    arch: str,
    package: str = PACKAGE,
    *,
    gpu: str = "",
    only: Callable[[str], bool] | None = None,
    on_failure: OnFailure | None = None,
) -> dict[str, Compiled]:
    """Compile the kernels that `call` launches; returns them by name, the last launch of each.

    `call` calls the op of `variant`, of the importable `package`, with CPU tensors; what it returns is not filled in.
    `gpu`: the folder of tuned tiles that the call chooses from, such as h100; "" for the architecture's defaults.
    `only` says by name which kernels are wanted: the others are neither compiled nor launched. A kernel that does not
    compile raises Triton's error, or is passed to `on_failure` and left out.

    May be called any number of times, in any number of processes at once. The threads of a process take turns, and
    other threads must launch no kernels meanwhile, because these would be compiled and not launched. A GPU of this
    machine is not touched, and kernels launched on it later are compiled for that GPU.
    """
    compiled: dict[str, Compiled] = {}
    run = _jit_function().run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Compiled | None:
        name: str = kernel.__name__
        if only is not None and not only(name):
            return None
        try:
            result = run(kernel, *args, **options | {"warmup": True})
        except Exception as error:
            if on_failure is None:
                raise
            on_failure(name, error)
            return None
        # None where a hook of Triton refuses to compile it.
        if result is not None:
            compiled[name] = result
        return result

    with _ALONE, _believing_in(arch, gpu, variant, package, compile_only):
        call()
    return compiled


class AbsentGPU:
    """A Triton driver that knows its architecture and nothing else."""

    def __init__(self, arch: str) -> None:
        self.target = target_of(arch)
        # A kernel caches compiled code by device number. Each architecture has its own number, which no GPU has.
        self.number = next(_NUMBERS)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("nothing is launched here")


_absent_gpu = cache(AbsentGPU)


def check_not_interpreted() -> None:
    """Raise `CodegenError` if Triton's interpreter is on."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise CodegenError("with TRITON_INTERPRET in the environment nothing is compiled: unset it")


def _jit_function() -> Any:
    """The class of jitted kernels."""
    from triton.runtime.jit import JITFunction

    check_not_interpreted()
    return JITFunction


@contextmanager
def _believing_in(arch: str, gpu: str, variant: str, package: str, run: Callable[..., Any]) -> Iterator[None]:
    """Inside, the ops of `variant` launch kernels with `run`, on CPU tensors, as if for a GPU of `arch`."""
    from triton.runtime import driver

    getattr(importlib.import_module(f"{package}.torch"), variant)  # loads the modules that are patched
    with ExitStack() as stack:
        # Not `driver.reset_active()` at the end: that looks for a real GPU.
        stack.enter_context(_replaced(driver, "_active", _absent_gpu(arch)))
        stack.enter_context(_replaced(_jit_function(), "run", run))
        stack.enter_context(_replaced_everywhere(package, "runs_reference", lambda _: False))
        stack.enter_context(_replaced_everywhere(package, "arch_of", lambda _: arch))
        if gpu:
            stack.enter_context(_replaced_everywhere(package, "gpu_of", lambda _: gpu))
        yield


@contextmanager
def _replaced_everywhere(package: str, name: str, value: Callable[..., object]) -> Iterator[None]:
    """Replace a function in every module of a package that holds it, for a while.

    Modules are searched for the name, so that packages of older revisions with other modules compile too.
    """

    replacements: dict[Any, Any] = {}
    for module in _modules(package):
        if original := vars(module).get(name):
            # Each function has its own replacement object, so that the original can be looked up by it.
            setattr(module, name, replacements.setdefault(original, partial(value)))
    if not replacements:
        raise CodegenError(f"no module of the package {package} has a function {name}: it cannot be compiled offline")
    originals = {replacement: original for original, replacement in replacements.items()}
    try:
        yield
    finally:
        # Modules that were imported meanwhile have replacements, too.
        for module in _modules(package):
            if (function := vars(module).get(name)) in originals:
                setattr(module, name, originals[function])


def _modules(package: str) -> list[Any]:
    """The modules of a package that have been imported so far."""
    return [module for name, module in [*sys.modules.items()] if name.startswith(f"{package}.")]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of `owner` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
