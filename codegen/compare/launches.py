"""The launches of one call, each described at a level at which equal descriptions prove equal machine code.

This runs in a worker process, which imports one package only: two packages may have the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from codegen.compare.calls import Call, arch_of, is_wanted, run, variant_of
from codegen.compare.machine import assembly, facts_of, machine_code
from codegen.compile.offline import compile_launches
from codegen.compile.packages import imported
from codegen.render.files import write_atomically
from codegen.spec.model import Variant


class Level(IntEnum):
    """What is compared. Each level costs more than the one before it, and reports fewer false differences.

    SOURCE: the arguments that a kernel of unchanged code is specialised for. IR: Triton's IR after inlining, from which
    the compiler makes the machine code without looking at anything else. CODE: the assembly and the machine code.
    """

    SOURCE = 0
    IR = 1
    CODE = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of a package whose launches are to be described.

    `unchanged`: the kernels that need no compiling at `level` SOURCE; all others are described at level IR there.
    `names`: the kernels of interest, None for all. Texts are kept in the folder `texts`, by digest.
    """

    call: Call
    variant: Variant
    package: Path
    level: Level
    texts: Path
    unchanged: frozenset[str] = frozenset()
    names: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of the kernel `name`.

    `facts` is the digest of the launch's own properties, such as the grid. `codes` are digests of the kernel in several
    representations: two launches are equal if their facts are equal and any one representation is. `error` says why a
    launch has no representation.
    """

    name: str
    level: Level
    facts: str = ""
    codes: tuple[str, ...] = ()
    error: str = ""

    def equals(self, other: Launch) -> bool:
        """True if both launches run the same machine code in the same grid."""
        comparable = self.level is other.level and not self.error and not other.error
        return comparable and self.facts == other.facts and any(map(str.__eq__, self.codes, other.codes))


def launches(request: Request) -> list[Launch]:
    """The launches of a call, in order."""
    package = imported(request.package)
    found: list[Launch] = []

    def wanted(name: str) -> bool:
        return is_wanted(request.call, name) and (request.names is None or name in request.names)

    # Triton prints the code that an assembler refused.
    with contextlib.redirect_stdout(io.StringIO()), _recording(request, found.append):
        compile_launches(
            lambda: run(request.call, request.variant, request.package, package),
            variant_of(request.call),
            arch_of(request.call),
            package,
            only=wanted,
            on_failure=lambda _name, _error: None,
        )
    return found


@dataclass(frozen=True)
class _Lowered:
    """A kernel that was not compiled to the end: its description, and the options of the compiler."""

    text: str
    options: Mapping[str, Any]


@contextlib.contextmanager
def _recording(request: Request, record: Callable[[Launch], None]) -> Iterator[None]:
    """Compile each launch as far as the level needs, and record it. Machine code has no debug information."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run_kernel = JITFunction.run

    def recorded(kernel: Any, *args: Any, **options: Any) -> Any:
        level = request.level
        if level is Level.SOURCE and kernel.__name__ not in request.unchanged:
            level = Level.IR
        launch = Launch(name=kernel.__name__, level=level)
        try:
            compiled = _compiled(run_kernel, kernel, level, args, options)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            record(replace(launch, error=f"{type(error).__name__}: {lines[0]}"))
            raise
        record(_described(launch, compiled, options["grid"], request))
        return compiled

    # A scope's end restores all settings of Triton that are changed inside it.
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        JITFunction.run = recorded
        try:
            yield
        finally:
            JITFunction.run = run_kernel


def _compiled(run_kernel: Any, kernel: Any, level: Level, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from triton.runtime import driver

    # A kernel caches what was compiled for it, and each level compiles something else: the cache is cleared. Reading
    # the empty cache creates the device's entry, which also sets `kernel.compile`.
    kernel.device_caches.clear()
    kernel.device_caches[driver.active.get_current_device()]
    compile_kernel = kernel.compile
    if level is not Level.CODE:
        kernel.compile = _specialisation if level is Level.SOURCE else _lower
    try:
        return run_kernel(kernel, *args, **options)
    finally:
        kernel.compile = compile_kernel
        kernel.device_caches.clear()


def _specialisation(src: Any, target: Any = None, options: Any = None, **_: Any) -> _Lowered:
    """The arguments that a kernel would be specialised for; it takes the place of `triton.compile`."""
    constants = sorted((src.fn.arg_names[path[0]], path[1:], str(value)) for path, value in src.constants.items())
    return _Lowered(f"{sorted(src.signature.items())}\n{constants}\n{src.attrs}\n{target}", options)


def _lower(src: Any, target: Any = None, options: Any = None, **_: Any) -> _Lowered:
    """Triton's IR after the compiler's first stage: helpers are inlined, names gone. Replaces `triton.compile`."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, src.language)
    codegen_functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = src.make_ir(target, parsed, codegen_functions, modules, context)
    return _Lowered(stages[src.ext](module, {}).str_nodebug(), parsed.__dict__)


def _described(launch: Launch, compiled: Any, grid: Any, request: Request) -> Launch:
    def kept(text: str) -> str:
        # Kernels may be renamed.
        return _kept(text.replace(launch.name, "kernel"), request.texts)

    grid_text = f"grid: {'computed' if callable(grid) else tuple(grid)}"
    if isinstance(compiled, _Lowered):
        options = [f"{name}: {value}" for name, value in sorted(compiled.options.items())]
        return replace(launch, facts=kept("\n".join([grid_text, *options])), codes=(kept(compiled.text),))
    facts = "\n".join([grid_text, *facts_of(compiled)])
    codes = [assembly(compiled), machine_code(compiled)]
    return replace(launch, facts=kept(facts), codes=tuple(kept(code) for code in codes))


def _kept(text: str, folder: Path) -> str:
    """Write a text to a file named by its digest; returns the digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / digest
    if not path.exists():
        write_atomically(path, text)
    return digest
