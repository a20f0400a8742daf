# SPDX-License-Identifier: Apache-2.0
"""A process that compiles kernels into Triton's cache on disk, where the process that launches them finds them.

A forked copy of this process compiles each kernel. The process imports Triton alone, no framework, never touches a GPU,
and ends with the process that started it.
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

COMPILER_OPTIONS = {"enable_fp_fusion": True}
"""Triton's options for every kernel.

Triton 3.10 will multiply and add in one instruction only if it is asked to, and 3.9 warns of that at the first kernel
of a process. Kernels are as fast and as exact as measured only with such instructions.
"""


class Job(NamedTuple):
    """A kernel to compile, with its launcher: C code that depends on the types of arguments.

    Attributes:
        module, name: the kernel's module and its name there.
        signature, constants, attributes, options: what Triton specialises the kernel for.
    """

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]


class Order(NamedTuple):
    """The kernels to compile, the target (Triton's `GPUTarget`) and the cache's folder.

    Attributes:
        first: kernels that the call launches. Once they are compiled, a byte is written to the standard output.
        others: kernels that the backward launches. Once they are compiled, too, the process ends.
    """

    first: Sequence[Job]
    others: Sequence[Job]
    target: Any
    folder: str


def serve() -> None:
    """Read an order and then the hash of Triton's files from the standard input, and compile what is ordered."""
    # The process ends soon, so collecting garbage would only cost time.
    gc.disable()
    from triton import knobs
    from triton.compiler import compiler  # noqa: F401
    from triton.experimental.gluon import _runtime  # noqa: F401
    from triton.runtime import cache

    visit_loops_once()
    order: Order = pickle.load(sys.stdin.buffer)
    for job in (*order.first, *order.others):
        # Imported once for all forked copies. Errors, here and in the copies, are dropped: what this process does not
        # compile, its caller compiles at the launch, and reports why that fails.
        with suppress(Exception):
            importlib.import_module(job.module)
    key: str = pickle.load(sys.stdin.buffer)
    if hasattr(cache, "triton_key"):
        # Otherwise this process would hash half a gigabyte of files, which the caller has already done.
        cache.triton_key = lambda: key
    knobs.cache.dir = order.folder
    # All forks come before the first thread.
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
    # Skip the interpreter's shutdown, because another thread still reads the standard input.
    os._exit(0)


def begin(work: Callable[..., object], *args: Any) -> Callable[[], object]:
    """Start `work` in a thread; returns a function that waits for its end."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread.join


def _begin_apart(work: Callable[..., object], *args: Any) -> Callable[[], object]:
    """As `begin`, but in a forked process if the system can fork: half of a compilation holds Python's GIL."""
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
    """The hash of Triton's own files (half a gigabyte), a part of each kernel's cache key. Triton caches the hash."""
    from triton.runtime import cache

    key: str = getattr(cache, "triton_key", str)()
    return key


def hash_kernel(kernel: Any) -> None:
    """Have Triton hash the code of a kernel, for the kernel's key in the cache, after all functions that it calls.

    The hash covers the global constants that a called function reads if the function was hashed earlier, on behalf of
    another kernel, but not if it is hashed with this one (Triton 3.6). So a kernel's key would depend on the kernels
    that were launched before it, and one process would not find what another has compiled.
    """
    # An interpreted kernel has no hash.
    if getattr(kernel, "hash", "") is None:
        _hash_callees_first(kernel, set())


def _hash_callees_first(function: Any, begun: set[int]) -> None:
    begun.add(id(function))
    for name in function.fn.__code__.co_names:
        found = function.__globals__.get(name)
        # The functions of a class are hashed with it.
        for callee in getattr(found, "hash_attrs", (found,)):
            if getattr(callee, "hash", "") is None and id(callee) not in begun:
                _hash_callees_first(callee, begun)
    _ = function.cache_key


def visit_loops_once() -> None:
    """Make Triton's frontend search each loop for its loop-carried values once only, in this process.

    Each search is an extra visit of the loop's body, so the body of a loop within three others is visited 16 times.
    The carried values follow from the loop's code and from the types of the values that are known before it.
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
    """End the process when the standard input ends, which the caller keeps open while it runs."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _source(job: Job) -> Any:
    """The job as a source object of Triton's compiler."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(job.module), job.name)
    hash_kernel(kernel)
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
