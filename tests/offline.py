"""Compiles the kernels of an op's call for an architecture that is not there: real arguments, no launch, no GPU.

An op is called with CPU tensors while Triton believes in a GPU of that architecture, so that each kernel is specialised
for the very arguments the op gives it. The interpreter overlooks what only the compiler refuses, such as a global
that is no `tl.constexpr`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.golden import Inputs, evaluate


def target_of(arch: str) -> GPUTarget:
    """`sm_90` or `gfx942` as Triton's compiler calls it."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64)


class AbsentGPU(DriverBase):  # type: ignore[misc]  # Triton has no types
    """A driver that knows its architecture and nothing else."""

    # A kernel keeps what it compiled by device number: each architecture gets its own.
    _numbers: dict[str, int] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, arch: str) -> None:
        self.target = target_of(arch)
        self.number = self._numbers.setdefault(arch, len(self._numbers))

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("nothing is launched here")


@contextmanager
def _believing_in(arch: str, variant: str, package: str) -> Iterator[dict[str, Any]]:
    """Launches compile and are noted by the kernel's name, instead of being launched."""
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        compiled[kernel.__name__] = result = run(kernel, *args, **options | {"warmup": True})
        return result

    ops = importlib.import_module(f"{package}.{variant}.torch_op")
    support = importlib.import_module(f"{package}._runtime.torch_support")
    with (
        # Not `driver.reset_active()` at the end: that looks for a real GPU.
        mock.patch.object(driver, "_active", AbsentGPU(arch)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(ops, "runs_reference", return_value=False),
        mock.patch.object(support, "arch_of", return_value=arch),
    ):
        yield compiled


def compile_call(
    variant: str, arch: str, inputs: Inputs, *, package: str = "generated", **options: Any
) -> dict[str, Any]:
    """The compiled kernels of a forward and backward, by name; what the call returns is not filled in."""
    op = getattr(importlib.import_module(f"{package}.torch"), variant)
    with _believing_in(arch, variant, package) as compiled:
        evaluate(op, inputs, **options)
    return compiled
