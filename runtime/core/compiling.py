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
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A kernel to compile, or its launcher alone: C code that depends on the types of arguments.

    Attributes:
        module, name: where the kernel is. signature, constants, attributes, options: what Triton compiles it for.
        is_launched: whether it is to be compiled; its launcher always is.
    """

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]
    is_launched: bool


class Order(NamedTuple):
    """All that is to be compiled, for which target, of Triton's `GPUTarget`, and into which folder."""

    jobs: Sequence[Job]
    target: Any
    folder: str


def serve() -> None:
    """Do the order that comes on the standard input."""
    # Nothing is thrown away before the end, which is near.
    gc.disable()
    from triton import knobs

    # While the order is made: Triton hashes itself, without Python's lock, and the rest is imported.
    hashed = begin(hash_triton)
    from triton.compiler import compiler  # noqa: F401
    from triton.experimental.gluon import _runtime  # noqa: F401

    order: Order = pickle.load(sys.stdin.buffer)
    # Otherwise each kernel would hash.
    hashed()
    knobs.cache.dir = order.folder
    # A process is copied while it has one thread.
    waits = [_begin_apart(compile_kernel, job, order.target) for job in order.jobs if job.is_launched]
    waits += [begin(_compile_launcher, job, order.target) for job in order.jobs]
    begin(_end_with_caller)
    for wait in waits:
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


def hash_triton() -> None:
    """Hash Triton's own files, half a gigabyte, a part of the key of each kernel: it remembers that."""
    from triton.runtime import cache

    getattr(cache, "triton_key", int)()


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


def compile_kernel(job: Job, target: Any) -> None:
    """Compile a kernel into Triton's cache, where it is not there."""
    from triton.compiler.compiler import compile as triton_compile

    triton_compile(_source(job), target=target, options=dict(job.options))


def _compile_launcher(job: Job, target: Any) -> None:
    if target.backend != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    metadata = SimpleNamespace(**{**job.options, **dict.fromkeys(sizes, 1)}, tensordesc_meta=None)
    CudaLauncher(_source(job), metadata)
