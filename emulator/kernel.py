"""A kernel's source, executed with the emulation's names in place of Triton's."""

from __future__ import annotations

import builtins
import inspect
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from . import values
from .device import Program, Timing
from .errors import EmulationError, check
from .partitions import EMULATED
from .tiles import Tile
from .values import Memory, Pointer, Value, scalar

VERSIONS = "gl_versions"
"""The module of the device library that hides differences between versions of Triton; the emulation replaces it."""

VIEWS_GROW = True
"""The `VIEWS_GROW` of this module: True as for Triton before 3.8. A test may set False, as for later ones, unless its
kernel reads pages: such a kernel stores to the tiles that it gets from `reinterpret`."""


def device_sources(kernel_file: Path) -> dict[str, str]:
    """The device library of the package that a kernel file belongs to: module name -> source."""
    folder = next(parent / "_runtime" / "device" for parent in kernel_file.parents if (parent / "_runtime").is_dir())
    paths = [folder / "block_seqs.py", *sorted(folder.glob("gl*.py"))]
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@cache
def _compiled(source: str, file: str) -> CodeType:
    """The code of a module: many kernels import the same modules of the device library."""
    return compile(source, file, "exec", dont_inherit=True)


class Kernel:
    """A kernel that is launched as a jitted function is: `kernel[grid](*arguments, **constants)`.

    `device`: the modules of the device library from which the kernel imports functions: name -> source.
    """

    def __init__(self, source: str, name: str, timing: Timing, device: Mapping[str, str] | None = None) -> None:
        self.launches = 0
        self._timing, self._file = timing, f"{EMULATED}{name}>"
        self._program: Program | None = None
        self._device = dict(device or {})
        self._modules = self._language()
        self._function: Callable[..., None] = self._executed(name, source)[name]

    def _executed(self, name: str, source: str) -> dict[str, Any]:
        """The names that a module defines."""
        file = f"{EMULATED}{name}>"
        # With its text in the cache, tracebacks show the module's lines.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        space: dict[str, Any] = {"__name__": name, "__builtins__": self._builtins()}
        exec(_compiled(source, file), space)
        return space

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            # This is an option of a compiler, and there is none here.
            constants.pop("enable_fp_fusion", None)
            bound = inspect.signature(self._function).bind(*arguments, **constants)
            annotations = self._function.__annotations__
            given = {
                name: x if annotations.get(name) is _constexpr else _argument(x, annotations.get(name))
                for name, x in bound.arguments.items()
            }
            for number in range(grid[0]):
                self._program = Program(number, grid[0], num_warps, self._timing, self._file)
                self._function(**given)
            self._program = None
            self.launches += 1

        return launch

    def _running(self) -> Program:
        check(self._program is not None, "no program runs")
        assert self._program is not None
        return self._program

    def _of_program(self, name: str) -> Callable[..., Any]:
        """A method of the program that runs."""
        return lambda *args, **options: getattr(self._running(), name)(*args, **options)

    def _builtins(self) -> dict[str, Any]:
        """Python's builtins, except that `range` counts in 32 bits and that imports return emulated modules."""

        def find(
            name: str, _globals: Any = None, _locals: Any = None, _names: Sequence[str] = (), level: int = 0
        ) -> Any:
            # The device library is imported relative to the package.
            module = name.rpartition(".")[2] if level else name
            if module not in self._modules:
                if not level or module not in self._device:
                    raise EmulationError(f"a kernel imports {name}")
                self._modules[module] = SimpleNamespace(**self._executed(module, self._device[module]))
            return self._modules[module]

        return {**vars(builtins), "range": values.device_range, "__import__": find}

    def _language(self) -> dict[str, Any]:
        """The emulated modules of Triton, by name."""
        method = self._of_program
        language = SimpleNamespace(
            **{name: getattr(values, name) for name in _FUNCTIONS},
            **{name: getattr(real, name) for name in _REAL},
            **{name: values.elementwise(getattr(torch, name)) for name in _ELEMENTWISE},
            max=values.reduction(torch.amax),
            min=values.reduction(torch.amin),
            sum=values.reduction(torch.sum),
            constexpr=_constexpr,
            pointer_type=values.PointerType,
            static_range=range,
            program_id=lambda axis: scalar(self._running().number if axis == 0 else 0),
            num_programs=lambda axis: scalar(self._running().grid if axis == 0 else 1),
            inline_asm_elementwise=method("inline_asm_elementwise"),
            allocate_shared_memory=method("allocate_shared_memory"),
            warp_specialize=method("warp_specialize"),
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=real_mbarrier.MBarrierLayout,
            init=lambda barrier, *, count: barrier.init(count),
            expect=method("expect"),
            arrive=method("arrive"),
            wait=method("wait"),
        )
        tma = SimpleNamespace(
            make_tensor_descriptor=method("make_tensor_descriptor"),
            store_wait=method("store_wait"),
        )
        hopper = SimpleNamespace(
            fence_async_shared=method("fence_async_shared"),
            mbarrier=mbarrier,
            tma=tma,
            warpgroup_mma=method("warpgroup_mma"),
            warpgroup_mma_wait=method("warpgroup_mma_wait"),
        )
        gluon = SimpleNamespace(jit=_jit, language=language)
        return {
            "triton": SimpleNamespace(constexpr_function=_constexpr_function),
            "triton.language": SimpleNamespace(constexpr=_constexpr),
            "triton.experimental": SimpleNamespace(gluon=gluon),
            "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
            VERSIONS: SimpleNamespace(
                aggregate=dataclass(frozen=True, eq=False),
                concat=operator.add,
                async_load=method("async_load"),
                async_add=method("async_add"),
                reinterpret=Tile.reinterpret if VIEWS_GROW else Tile.view,
                VIEWS_GROW=VIEWS_GROW,
                # As for Triton 3.9: then `late_zero` computes its stage, and does not return a constant.
                ADDRESSES_ARE_HELD=True,
            ),
        }


# Names of Gluon that `values` implements; names taken from Gluon itself; and functions that torch has by the same name.
_FUNCTIONS = (
    *(
        "arange",
        "atomic_add",
        "cast",
        "cdiv",
        "convert_layout",
        "full",
        "load",
        "maximum",
        "minimum",
    ),
    *("broadcast", "join", "permute", "reshape", "split", "store", "where", "zeros", "zeros_like"),
)
_REAL = (
    *("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout"),
    *("DistributedLinearLayout", "SwizzledSharedLayout", "shared_memory_descriptor", "tensor", "tuple"),
    *("bfloat16", "float16", "float32", "int1", "int8", "int16", "int32", "int64", "uint32", "uint64"),
)
_ELEMENTWISE = ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt")


def _constexpr(value: Any) -> Any:
    """`gl.constexpr`, which marks a parameter as an annotation and returns a value unchanged."""
    return value


def _constexpr_function(function: FunctionType) -> Callable[..., Any]:
    """A function with Python's own builtins: the compiler runs it as Python, where `range` counts in Python's ints."""

    def run(*arguments: Any) -> Any:
        space = {**function.__globals__, "__builtins__": builtins}
        return FunctionType(function.__code__, space, function.__name__, function.__defaults__)(*arguments)

    return run


def _jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def _argument(x: Any, annotation: Any) -> Any:
    """An argument as a kernel gets it."""
    if isinstance(x, Tensor):
        return Pointer(Memory.of(x), Value(torch.tensor(0)))
    if annotation in values.SIGNED:
        return values.unsigned(x, annotation)
    return scalar(x) if isinstance(x, int | float) else x
