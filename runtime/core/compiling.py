"""A process that compiles kernels into Triton's cache on disk, where the process that launches them finds them.

Each kernel is compiled by a copy of it. It imports Triton alone, no framework, never touches a GPU, and ends with the
process that started it.
"""

import gc
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A kernel to compile, with its launcher: C code that depends on the types of arguments.

    Attributes:
        module, name: where the kernel is. signature, constants, attributes, options: what Triton compiles it for.
    """

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]


class Order(NamedTuple):
    """All that is to be compiled, for which target, of Triton's `GPUTarget`, and into which folder.

    Attributes:
        first: what the call launches: once it is compiled, a byte is written to the standard output.
        others: what the backward launches: once it is compiled, too, the process ends.
    """

    first: Sequence[Job]
    others: Sequence[Job]
    target: Any
    folder: str


def serve() -> None:
    """Read an order and then the hash of Triton's files from the standard input, and compile what is ordered."""
    # Nothing is thrown away before the end, which is near.
    gc.disable()
    from triton import knobs
    from triton.compiler import compiler  # noqa: F401
    from triton.experimental.gluon import _runtime  # noqa: F401
    from triton.runtime import cache

    visit_loops_once()
    order: Order = pickle.load(sys.stdin.buffer)
    for job in (*order.first, *order.others):
        # Once for all copies. What goes wrong here goes wrong in a copy, too.
        with suppress(Exception):
            importlib.import_module(job.module)
    key: str = pickle.load(sys.stdin.buffer)
    if hasattr(cache, "triton_key"):
        # Otherwise this would hash half a gigabyte, which the caller has done.
        cache.triton_key = lambda: key
    knobs.cache.dir = order.folder
    # A process is copied while it has one thread.
    first, others = (
        [_begin_apart(_compile, job, order.target) for job in jobs] for jobs in (order.first, order.others)
    )
    launchers = [begin(_compile_launcher, job, order.target) for job in order.first]
    others += [begin(_compile_launcher, job, order.target) for job in order.others]
    begin(_end_with_caller)
    for wait in first + launchers:
        wait()
    os.write(sys.stdout.fileno(), b"1")
    for wait in others:
        wait()
    # Not through the end of the interpreter, where another thread reads.
    os._exit(0)


def begin(work: Callable[..., object], *args: Any) -> Callable[[], object]:
    """Begin some work in a thread; returns what waits for it."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread.join


def _begin_apart(work: Callable[..., object], *args: Any) -> Callable[[], object]:
    """The same in a copy of this process, where there are copies: half of a compilation holds Python's lock."""
    if not hasattr(os, "fork"):
        return begin(work, *args)
    copy = os.fork()
    if copy:
        return partial(os.waitpid, copy, 0)
    try:
        begin(_end_with_caller)
        work(*args)
    finally:
        os._exit(0)


def hash_triton() -> str:
    """The hash of Triton's own files, half a gigabyte, a part of the key of each kernel: it remembers that."""
    from triton.runtime import cache

    key: str = getattr(cache, "triton_key", str)()
    return key


def visit_loops_once() -> None:
    """Have Triton's frontend look once at each loop for what the loop carries, in this process.

    To find that it visits the body once more, and so the body of a loop within three others 16 times. What a loop
    carries follows from its code and from the types of what is known before it.
    """
    from triton.compiler.code_generator import CodeGenerator

    find: Any = getattr(CodeGenerator, "_find_carries", None)
    if find is None:
        return
    from triton.compiler.code_generator import _is_triton_value, flatten_values_to_ir

    def find_once(self: Any, node: Any, liveins: dict[str, Any], ignore: Any = frozenset()) -> Any:
        found = self.__dict__.setdefault("carried_names", {}).setdefault(node, [])
        known = [(name, x.type if _is_triton_value(x) else x) for name, x in liveins.items()]
        names = next((names for each, names in found if each == known), None)
        if names is None:
            result = find(self, node, liveins, ignore)
            found.append((known, [*result[0]]))
            return result
        self.lscope, self.local_defs = liveins.copy(), {}
        carried = [liveins[name] for name in names]
        return [*names], flatten_values_to_ir(carried), [x.type for x in carried]

    CodeGenerator._find_carries = find_once


def _end_with_caller() -> None:
    """End when the input ends, which the caller keeps open."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _source(job: Job) -> Any:
    """What Triton's compiler takes."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(job.module), job.name)
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    return make(kernel, job.signature, job.constants, job.attributes)


def _compile(job: Job, target: Any) -> None:
    from triton.compiler.compiler import compile as compile_kernel

    compile_kernel(_source(job), target=target, options=dict(job.options))


def _compile_launcher(job: Job, target: Any) -> None:
    if target.backend != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    metadata = SimpleNamespace(**{**job.options, **dict.fromkeys(sizes, 1)}, tensordesc_meta=None)
    CudaLauncher(_source(job), metadata)
