"""Triton kernels as calls of XLA.

A kernel is compiled once for each specialisation, into Triton's own cache on disk. jaxlib's handler for Triton kernels
launches it. The compiled kernel and its launch parameters are part of the XLA program, as a message of jaxlib's
`triton.proto`. The handler identifies a kernel by the bytes of the message, so that no Python runs with the program.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax

from ..archs import DEFAULT_MULTIPROCESSORS, HOPPER_FAMILY
from ..core.checks import fail
from ..core.compiling import COMPILER_OPTIONS, hash_kernel
from ..core.configs import INTERPRETER, Tiles, tiles_for
from ..core.options import CallOptions
from ..core.paged_tiles import PagedConfig, PagedTiles, paged_tiles
from ..core.settings import HAS_TRITON as HAS_TRITON
from ..core.settings import INTERPRET as INTERPRET
from ..core.tiles import MaskSizes
from ..core.tuned import gpu_key
from .interpreter import interpreted
from .tensor import Tensor

HANDLER = "triton_kernel_call_ffi"
"""The handler's name. `jax.export` must allow it by `DisabledSafetyCheck.custom_call(HANDLER)`."""

ARCH_VARIABLE = "ATTENTION_ARCH"
_arch: ContextVar[str] = ContextVar("arch")

_TYPES = {
    "bool": "i1",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
}


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Kernels launched inside are compiled for this architecture."""
    token = _arch.set(arch)
    try:
        yield
    finally:
        _arch.reset(token)


def device_arch(op: str) -> str:
    """The architecture to compile for: ATTENTION_ARCH if it is set, else that of the GPUs of this process."""
    if named := os.environ.get(ARCH_VARIABLE):
        if not re.fullmatch(r"sm_\d+", named):
            fail(op, ARCH_VARIABLE, "an NVIDIA chip, such as sm_90: the JAX ops run on no others", repr(named))
        return named
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        remedy = f"name the one to compile for, as {ARCH_VARIABLE}=sm_90"
        raise RuntimeError(f"{op}: JAX sees no NVIDIA GPU: install jax[cuda13], or {remedy}") from None
    return _capability(device)


def _capability(device: Any) -> str:
    return f"sm_{str(device.compute_capability).replace('.', '')}"


def arch_of(_x: Tensor) -> str:
    """The architecture that kernels are being compiled for."""
    return _arch.get()


@cache
def _device_gpu(arch: str) -> str:
    """The folder with the tuned tiles of this process's GPU; "" if it has no GPU or `arch` is another chip."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return ""
    return gpu_key(device.device_kind) if _capability(device) == arch else ""


def call_tiles(op: str, mode: str, q: Tensor, v: Tensor, length: int, options: CallOptions, sizes: MaskSizes) -> Tiles:
    """The tiles of each pass of a call. `length`: keys of a sequence; the average if sequences are packed."""
    arch = arch_of(q)
    gpu = "" if arch == INTERPRETER else _device_gpu(arch)
    dims, heads = (q.shape[3], v.shape[3]), (q.shape[1], v.shape[1])
    return tiles_for(op, mode, arch, gpu, q.element, dims, heads, length, options, sizes)


def paged_call_tiles(op: str, q: Tensor, k: Tensor, group: int, config: PagedConfig) -> PagedTiles:
    """The tiles of a call on paged caches `k`."""
    arch = arch_of(q)
    gpu = "" if arch == INTERPRETER else _device_gpu(arch)
    return paged_tiles(op, arch, gpu, q.element, k.element, q.shape[-1], group, config)


@cache
def _multiprocessors(arch: str) -> int:
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        device = None
    if device is None or _capability(device) != arch:
        return DEFAULT_MULTIPROCESSORS
    return int(device.core_count)


def multiprocessors(x: Tensor) -> int:
    """The number of multiprocessors, each of which runs one program if a program fills it."""
    return _multiprocessors(arch_of(x))


def is_nvidia(x: Tensor) -> bool:
    """Whether kernels may hold PTX."""
    return arch_of(x).startswith("sm_")


def has_tanh_instruction(x: Tensor) -> bool:
    """Whether tanh is one instruction, exact enough for 16-bit inputs: on NVIDIA chips."""
    return x.element_size() <= 2 and is_nvidia(x)


def copies_by_tma(x: Tensor) -> bool:
    """Whether kernels of Hopper's family can copy an array: on sm_90. Arrays begin where TMA can read them."""
    return arch_of(x) == HOPPER_FAMILY.arch


def overlaps(_x: Tensor) -> bool:
    """Whether a kernel can be launched before its predecessor ends: never, as XLA launches one after the other."""
    return False


def is_loaded(*scalars: Any) -> bool:
    """Whether a call's scalars come as arrays; all of them do, or none."""
    return any(isinstance(scalar, Tensor) for scalar in scalars)


def launch(kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **options: Any) -> None:
    """Launch a Triton kernel, as `kernel[grid](*args, **options)` would, and fill the tensors without an array.

    `args` are the arguments of all groups.

    Among `args`, tensors that the kernel fills must come after those that it reads, because XLA passes buffers in this
    order. A tensor that an earlier launch filled in part is both read and filled: it keeps its memory.
    """
    args = tuple([x for group in groups for x in group])
    tensors = [x for x in args if isinstance(x, Tensor)]
    num_read = max((i + 1 for i, x in enumerate(tensors) if x.array is not None), default=0)
    for x in tensors[:num_read]:
        # A tensor without elements has no array: no kernel was launched to fill it.
        assert x.array is not None or x.numel() == 0, f"{kernel.__name__}: outputs must follow the inputs"
        x.array = x.value()
    filled, changed = tensors[num_read:], [x for x in tensors[:num_read] if x.in_parts]
    if grid[0] == 0:
        arrays: Sequence[jax.Array] = [x.value() for x in (*filled, *changed)]
    elif _arch.get() == INTERPRETER:
        arrays = interpreted(kernel, grid, args, options, filled, changed)
    else:
        arrays = _compiled_call(kernel, grid, args, options, filled, changed)
    for tensor, array in zip((*filled, *changed), arrays, strict=True):
        tensor.array = array


def _compiled_call(
    kernel: Any,
    grid: tuple[int],
    args: Sequence[Any],
    options: dict[str, Any],
    filled: Sequence[Tensor],
    changed: Sequence[Tensor],
) -> Sequence[jax.Array]:
    compiling = tuple((name, options[name]) for name in ("num_warps", "num_stages", "maxnreg") if name in options)
    signature, constants, divisible, parameters = [], [], [], []
    for i, param in enumerate(kernel.params):
        value = args[i] if i < len(args) else options[param.name]
        kind = "constexpr" if param.is_constexpr or value is None else _type(param, value)
        if kind != "constexpr" and isinstance(value, int) and value == 1 and not param.do_not_specialize:
            kind = "constexpr"
        signature.append((param.name, kind))
        if kind == "constexpr":
            constants.append((param.name, value))
            continue
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size() if value.array is None and value.zeroed else 0
            parameters.append(_array_parameter(size))
            divisible.append(i)
        else:
            parameters.append(_scalar_parameter(kind, value))
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                divisible.append(i)
    hash_kernel(kernel)
    found, scratch = _compile(kernel, tuple(signature), tuple(constants), tuple(divisible), compiling, _arch.get())
    results = [jax.ShapeDtypeStruct(x.memory, x.dtype) for x in filled]
    if scratch:
        # The kernel takes a pointer to scratch memory after the last parameter. The handler of older jaxlibs passes
        # none, so this memory is one more result.
        parameters.append(_array_parameter(0))
        results.append(jax.ShapeDtypeStruct((grid[0] * scratch,), "int8"))
    call = _field(1, found) + _field(2, grid[0]) + _field(3, 1) + _field(4, 1)
    call += b"".join(_field(5, parameter) for parameter in parameters)
    opaque = zlib.compress(_field(1, call) + _field(4, kernel.__name__.encode()))
    read = [x for x in args if isinstance(x, Tensor) and x.array is not None]
    # The handler passes one buffer for each parameter of the kernel. So changed tensors come last among the results, as
    # aliases of inputs.
    aliases = {read.index(x): len(results) + i for i, x in enumerate(changed)}
    results += [jax.ShapeDtypeStruct(x.memory, x.dtype) for x in changed]
    call_handler = jax.ffi.ffi_call(HANDLER, results, input_output_aliases=aliases)
    called: Sequence[jax.Array] = call_handler(*(x.array for x in read), opaque=opaque)
    return [*called[: len(filled)], *called[len(called) - len(changed) :]]


def _type(param: Any, value: Any) -> str:
    """Triton's type of an argument."""
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.element]}"
    if isinstance(value, float):
        return "fp32"
    return param.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")


@cache
def _compile(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    divisible: tuple[int, ...],
    compiling: tuple[tuple[str, int], ...],
    arch: str,
) -> tuple[bytes, int]:
    """Compile a kernel for one chip, without access to a device.

    Returns the part of the message that all calls of the kernel share, and the bytes of scratch memory of a program.
    `divisible`: the arguments that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    capability = int(arch.removeprefix("sm_"))
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=dict(signature),
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options: dict[str, Any] = dict(compiling) | COMPILER_OPTIONS
    if kernel.debug:
        options["debug"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = compiled.metadata
    name = metadata.name.encode()
    # Newer jaxlibs load Triton's machine code from this field. Older ones skip the field and assemble the PTX.
    image = _field(1, compiled.asm["cubin"]) + _field(2, name) + _field(3, metadata.shared)
    message = (
        _field(1, name)
        + _field(2, metadata.num_warps)
        + _field(10, metadata.num_ctas)
        + _field(3, metadata.shared)
        + _field(4, compiled.asm["ptx"].encode())
        + _field(6, capability)
        + _field(11, image)
    )
    return message, metadata.global_scratch_size


def _varint(value: int) -> bytes:
    """A number as a varint of Protocol Buffers. Negative numbers take 64 bits."""
    value &= 2**64 - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a message. Text and nested messages are given as bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _array_parameter(bytes_to_zero: int) -> bytes:
    return _field(1, (_field(1, bytes_to_zero) if bytes_to_zero else b"") + _field(2, 16))


def _scalar_parameter(kind: str, value: float) -> bytes:
    if kind == "fp32":
        return _varint(7 << 3 | 5) + struct.pack("<f", value)
    return _field({"i32": 3, "u32": 4, "i64": 5, "u64": 6}[kind], int(value))
