"""The resources that a compiled kernel uses, read from the compiler's output, against the limits of its chip."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.arch.chips import CHIPS, SIMDS, Chip
from codegen.compile.offline import Compiled

MOST_SPILLED = 128
"""More bytes per thread than this, written to and read from local memory, are a warning. Fewer are mostly values that
are computed before the loop and used after it."""

_NVIDIA_MATRIX = re.compile(r"^\s*(?:@%p\d+ )?(wgmma\.mma_async|tcgen05\.mma|mma)\.(\S+)", re.MULTILINE)
_AMD_MATRIX = re.compile(r"^\s*v_(mfma)_(\S+)", re.MULTILINE)
_SHAPE = re.compile(r"m\d+n\d+k\d+|\d+x\d+x\d+|kind::\w+")
_SHORT_NAMES = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05"}
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s+\[[^\]]+\],\s*\[[^\]]+\],\s*(\w+)")
_ANY_NOTE = re.compile(r"(?:warning|info)\s*:\s*(.*wgmma.*)")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources of one program: registers and spilled bytes per thread, shared memory in bytes per program.

    `instructions` counts the matrix instructions in the code, by kind and shape; `notes` are the assembler's messages
    about them. `copied`: bytes that asynchronous copies bring to shared memory if each instruction runs once.
    """

    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    tensor_columns: int = 0
    copied: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def usage(kernel: Compiled, arch: str) -> Usage:
    """The resources of a kernel compiled for `arch`."""
    chip = CHIPS[arch]
    return _nvidia_usage(kernel, chip) if chip.is_nvidia else _amd_usage(kernel, chip)


def _nvidia_usage(kernel: Compiled, chip: Chip) -> Usage:
    log = _assembler_log(kernel)
    return Usage(
        threads=kernel.metadata.num_warps * chip.lanes,
        registers=_number(r"Used (\d+) registers", log),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        shared=kernel.metadata.shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        copied=sum(int(size, 0) for size in _COPY.findall(kernel.asm["ptx"])) * kernel.metadata.num_warps * chip.lanes,
        instructions=_instructions(_NVIDIA_MATRIX, kernel.asm["ptx"]),
        notes=tuple(dict.fromkeys(_ANY_NOTE.findall(log))),
    )


def _amd_usage(kernel: Compiled, chip: Chip) -> Usage:
    code = kernel.asm["amdgcn"]
    # The assembler counts each spilled register once. Only the code shows how often it is written and read.
    widths = {"": 4, "x2": 8, "x3": 12, "x4": 16}
    stores, loads = (
        sum(widths[width] for width in re.findall(rf"^\s*scratch_{kind}_dword(x[234])? ", code, re.MULTILINE))
        for kind in ("store", "load")
    )
    return Usage(
        threads=kernel.metadata.num_warps * chip.lanes,
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        spill_stores=stores,
        spill_loads=loads,
        shared=kernel.metadata.shared,
        instructions=_instructions(_AMD_MATRIX, code),
    )


def _assembler_log(kernel: Compiled) -> str:
    """The log of ptxas for a kernel. Triton's backend assembles it once more, because it owns the options."""
    from triton import knobs
    from triton.compiler.compiler import make_backend

    target = kernel.metadata.target
    backend = make_backend(target)
    # A warp-specialised kernel has more warps than it is launched with, and their number may be no power of two, which
    # `parse_options` requires. The assembler does not need the number.
    options = backend.parse_options(kernel.metadata._asdict() | {"num_warps": 4})
    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(kernel.asm["ptx"], {}, options, target.arch)
    return said.getvalue()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern!r}")
    return int(found[1])


def _instructions(pattern: re.Pattern[str], code: str) -> dict[str, int]:
    """The matrix instructions of a text, counted by kind and shape, most first: `wgmma m64n128k16`."""
    counts: Counter[str] = Counter()
    for kind, rest in pattern.findall(code):
        shape = _SHAPE.search(rest)
        counts[" ".join([_SHORT_NAMES.get(kind, kind), *([shape[0]] if shape else [])])] += 1
    return dict(counts.most_common())


def errors(used: Usage, arch: str) -> list[str]:
    """Reasons why the chip cannot launch a program with these resources; empty if it can."""
    chip, found = CHIPS[arch], []
    if used.shared > chip.shared_memory:
        found.append(f"{used.shared} bytes of shared memory, {arch} has {chip.shared_memory}")
    if used.tensor_columns > chip.tensor_columns:
        found.append(f"{used.tensor_columns} columns of tensor memory, {arch} has {chip.tensor_columns}")
    registers, limit = _register_need(used, chip)
    if registers > limit:
        found.append(f"{registers} registers of {'a program' if chip.is_nvidia else 'a SIMD'}, it has {limit}")
    return found


def _register_need(used: Usage, chip: Chip) -> tuple[int, int]:
    """Registers that one program takes, and the number that exist: of a multiprocessor, on AMD of one lane of a SIMD,
    where accumulation registers count too."""
    granule = 8  # registers per thread are allotted in eights
    each = -(-used.registers // granule) * granule
    if chip.is_nvidia:
        return each * used.threads, chip.registers
    wavefronts = -(-used.threads // chip.lanes // SIMDS)
    return each * max(wavefronts, 1), chip.registers // SIMDS // chip.lanes


def warnings(used: Usage, *, multiplies_halves: bool) -> list[str]:
    """Signs of a slow kernel; `multiplies_halves`: it should use tensor cores on 16-bit elements."""
    found = []
    spilled = used.spill_stores + used.spill_loads
    if spilled > MOST_SPILLED:
        found.append(f"spills {used.spill_stores} bytes out, {used.spill_loads} in")
    if multiplies_halves and not used.instructions:
        found.append("no matrix instruction")
    found += [f"ptxas: {note}" for note in used.notes if "serializ" in note.lower()]
    return found
