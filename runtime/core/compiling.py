"""A process that compiles kernels into Triton's cache on disk, where the process that launches them finds them.

It imports Triton alone, no framework, never touches a GPU, and ends with the process that started it.
"""

import gc
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
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
    hashing = threading.Thread(target=hash_triton)
    hashing.start()
    from triton.compiler import compiler  # noqa: F401
    from triton.experimental.gluon import _runtime  # noqa: F401

    order: Order = pickle.load(sys.stdin.buffer)
    # Otherwise each thread would hash.
    hashing.join()
    knobs.cache.dir = order.folder
    threading.Thread(target=_end_with_caller, daemon=True).start()
    work = [threading.Thread(target=_compile, args=(job, order.target)) for job in order.jobs if job.is_launched]
    work += [threading.Thread(target=_compile_launcher, args=(job, order.target)) for job in order.jobs]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    # Not through the end of the interpreter, where another thread reads.
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
