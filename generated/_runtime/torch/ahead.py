# SPDX-License-Identifier: Apache-2.0
"""Compiles what the backward of a call launches while its forward is compiled: in a process that compiled neither, a
step then takes hardly longer than the longer of the two.

Threads do that, for Triton's compiler runs without Python's lock but for its first part. They launch nothing and change
nothing on the device. Where one fails, the call compiles the kernel itself, and raises what there is to raise.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.settings import HAS_TRITON, INTERPRET
from .launching import active, is_seen_by_others

if HAS_TRITON:
    from triton.runtime import cache, driver

ENABLED = HAS_TRITON and not INTERPRET

_IGNORED = [("ignore", None, kind, None, 0) for kind in (DeprecationWarning, PendingDeprecationWarning)]
"""Filters of warnings that Triton sets while it compiles."""


class Ahead:
    """What a call and its backward launch is compiled in threads, but for the kernels of the call itself."""

    def __init__(self, forward: Callable[[], object], backward: Callable[[], object], device: int) -> None:
        """`forward` and `backward` launch kernels, which in these threads compiles them. `device`: for which GPU."""
        self._device = device
        self._filters = warnings.filters
        self._others: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._collect, args=(forward, backward), name="compile ahead")
        self._thread.start()

    def wait(self) -> None:
        """Until all is compiled."""
        # `_others` grows until the first thread has ended.
        self._thread.join()
        for thread in self._others:
            thread.join()
        restore_filters(self._filters)

    def _collect(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        # Triton hashes itself once, which takes a while.
        self._quietly(getattr(cache, "triton_key", int))
        # What is computed beside launches may fail on tensors without values.
        active.compiles = self._compile_launcher
        self._quietly(forward)
        active.compiles = self._compile
        self._quietly(backward)

    def _compile(self, kernel: Any, grid: tuple[int], args: Sequence[Any], constants: dict[str, Any]) -> None:
        self._begin(partial(kernel.warmup, *args, grid=grid, **constants))
        self._compile_launcher(kernel, grid, args, constants)

    def _compile_launcher(self, kernel: Any, _grid: tuple[int], args: Sequence[Any], constants: dict[str, Any]) -> None:
        self._begin(partial(compile_launcher, kernel, args, constants))

    def _begin(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._quietly, args=(work,), name="compile ahead")
        thread.start()
        self._others.append(thread)

    def _quietly(self, work: Callable[[], object]) -> None:
        try:
            # A program that ends need not wait for what it will not launch.
            if threading.main_thread().is_alive():
                with torch.cuda.device(self._device):
                    work()
        except Exception:  # the call does it again, and raises what there is to raise
            pass


def compile_launcher(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
    """Compile the C code that launches a kernel, into Triton's cache on disk: it depends on the types of arguments
    alone, so that a compiler of C need not wait for the kernel."""
    *_, backend, binder = kernel.create_binder()
    asked = constants | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, options = binder(*args, **asked)
    options, signature, constexprs, attrs = kernel._pack_args(backend, asked, bound, specialization, options)
    unknown = dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size"), 0)
    metadata = SimpleNamespace(**vars(options) | unknown, profile_scratch_align=1, tensordesc_meta=None)
    driver.active.launcher_cls(kernel.ASTSource(kernel, signature, constexprs, attrs), metadata)


def restore_filters(before: Any) -> None:
    """Remove from the filters of warnings what threads that compiled at one time may have left there.

    Triton ignores deprecations while it compiles, and puts back the filters that it found: those of another thread.
    """
    found = warnings.filters
    if found is not before and _but_ignored(found) == _but_ignored(before):
        warnings.filters = before
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _but_ignored(filters: Any) -> list[Any]:
    return [each for each in filters if each not in _IGNORED]


def without_values(x: Any) -> Any:
    """A tensor that looks like another and has no memory; what is no tensor as it is."""
    if isinstance(x, list):
        return [without_values(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def compile_backward(kernels: Any, args: Sequence[Any]) -> None:
    """Begin to compile the backward of a first call of `Kernels` whose gradients are wanted.

    `args` are those of its forward.
    """
    given = dict(zip(kernels.parameters, args, strict=True))
    q, v, options = given["q"], given["v"], given["options"]
    if not ENABLED or not _runs_on_gpu(q) or options.plain:
        return
    wanted = [getattr(given[name], "requires_grad", False) for name in kernels.flags]
    kind = q.get_device(), q.dtype, q.shape[-1], v.shape[-1], options.key, *wanted
    if kind in kernels.compiled:
        return
    kernels.compiled.add(kind)
    # Threads keep no tensor of the call.
    found = {name: without_values(x) for name, x in given.items()}

    def forward() -> None:
        kernels.forward_kernels(*found.values())

    def backward() -> None:
        results = dict(zip(kernels.results, kernels.fake_forward(*found.values()), strict=True))
        every = found | results | {"do": without_values(results["o"]), "dlse": None}
        every |= dict(zip(kernels.flags.values(), wanted, strict=True))
        kernels.backward_kernels(*(every[name] for name in kernels.backward_parameters))

    # A system may refuse a thread.
    with suppress(RuntimeError):
        kernels.ahead.append(Ahead(forward, backward, q.get_device()))


def _runs_on_gpu(q: Tensor) -> bool:
    """Whether a call launches its kernels at once. One that is captured in a graph leaves other threads alone."""
    return q.is_cuda and not is_seen_by_others() and not torch.cuda.is_current_stream_capturing()


def wait_for_backward(kernels: Any) -> None:
    """Until the backward of `Kernels` is compiled, where that was begun."""
    while kernels.ahead and active.compiles is None:
        kernels.ahead.pop().wait()
