"""The machine code of a compiled kernel as text, without debug information."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.compile.offline import Compiled

_METADATA = (
    "num_warps",
    "num_ctas",
    "shared",
    "tmem_size",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "cluster_dims",
    "launch_cooperative_grid",
    "launch_pdl",
)
"""The fields of a kernel's metadata that a launch reads."""

_DEBUG_DIRECTIVES = (".loc", ".file", ".ident")

_ASSERTION_SOURCES = ("assertFile_", "assertFunc_")
"""Global strings: the source file and function of an assertion."""


def facts_of(kernel: Compiled) -> list[str]:
    """What a launch depends on besides the instructions: metadata, and the lines of PTX before the instructions."""
    found = [f"{name}: {getattr(kernel.metadata, name, None)}" for name in _METADATA]
    return [*found, *_head(assembly(kernel))]


def assembly(kernel: Compiled) -> str:
    """The PTX, or the assembly of an AMD chip, without comments and debug information."""
    code: str = kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]
    comment = "//" if "ptx" in kernel.asm else ";"
    return "\n".join(_code_lines(code, comment))


def machine_code(kernel: Compiled) -> str:
    """The instructions as disassembled from the binary; of an AMD chip the assembly, which names registers."""
    return _instructions(kernel.asm["sass"]) if "cubin" in kernel.asm else assembly(kernel)


def _code_lines(code: str, comment: str) -> Iterator[str]:
    in_debug_section = False
    for line in code.splitlines():
        text = line.partition(comment)[0].strip()
        if text.startswith(".section"):
            in_debug_section = ".debug" in text
        elif text.startswith(".text"):
            in_debug_section = False
        is_debug = in_debug_section or text.startswith(_DEBUG_DIRECTIVES)
        names_source = text.startswith(".global") and any(name in text for name in _ASSERTION_SOURCES)
        if text and not is_debug and not names_source:
            yield text


def _head(code: str) -> list[str]:
    """The lines of PTX before the first instruction: parameters, block size, register limit, global data."""
    head, brace, _ = code.partition("\n{")
    return head.splitlines() if brace else []


def _instructions(sass: str) -> str:
    return "\n".join(line.strip() for line in sass.splitlines() if line.strip())


def first_difference(old: str, new: str, lines: int = 3) -> list[str]:
    """The first lines that differ, marked `-` and `+`, after the line before them."""
    before, after = old.splitlines(), new.splitlines()
    shared = min(len(before), len(after))
    start = next((n for n in range(shared) if before[n] != after[n]), shared)
    context = [f"  line {start}: {before[start - 1]}"] if start else []
    removed = [f"- {line}" for line in before[start : start + lines]]
    return [*context, *removed, *(f"+ {line}" for line in after[start : start + lines])]
