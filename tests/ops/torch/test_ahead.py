"""The backward's kernels are compiled in threads beside the forward's; no GPU is needed."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="what is compiled ahead are Triton's kernels")

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from codegen.compile.offline import AbsentGPU
from codegen.testing.golden import load_op
from generated._runtime.torch import ahead, plans
from generated._runtime.torch import replay as torch_replay

pytestmark = pytest.mark.skipif(not ahead.ENABLED, reason="nothing is compiled here")
ARCH = "sm_80"  # Portable kernels, which compile fastest.
FORWARD, BACKWARD = {"causal_fwd"}, {"causal_bwd_dq", "causal_bwd_dkdv"}


class Compilations:
    """The names of kernels by the thread that compiled them: the one that calls, and all others. For each kernel that
    is launched the types and constants that its launcher is compiled for, and for each launcher compiled ahead."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.ahead: set[str] = set()
        self.launched: dict[str, Any] = {}
        self.launchers: dict[str, Any] = {}

    def note(self, *, metadata: Any, **_: Any) -> None:
        """What Triton tells of each."""
        is_here = threading.current_thread() is threading.main_thread()
        (self.here if is_here else self.ahead).add(metadata["name"])


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Compilations]:
    """Calls on CPU tensors compile what they would launch on a GPU, into a cache of their own."""
    noted = Compilations()

    def load(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = 1, 1, lambda *_: None
        noted.launched[kernel.name] = kernel.src.signature, kernel.src.constants

    def launcher(src: Any, _metadata: Any) -> None:
        noted.launchers[src.fn.__name__] = src.signature, src.constants

    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        op = importlib.import_module("generated.causal.torch_op")
        patch(op, "runs_reference", lambda _q: False)
        support = importlib.import_module("generated._runtime.torch.support")
        patch(support, "arch_of", lambda _x: ARCH)
        patch(support, "gpu_of", lambda _x: "")
        patch(driver, "_active", AbsentGPU.__new__(AbsentGPU))
        AbsentGPU.__init__(driver._active, ARCH)  # another number each time: a kernel remembers what it compiled by it
        driver._active.launcher_cls = launcher
        patch(CompiledKernel, "_init_handles", load)
        patch(torch_replay, "_is_current", lambda _x: True)
        patch(plans, "current_stream", lambda _device: 0)
        patch(ahead, "_runs_on_gpu", lambda _q: True)
        patch(torch.cuda, "device", lambda _index: nullcontext())
        patch(knobs.cache, "dir", str(tmp_path))
        patch(knobs.compilation, "listener", noted.note)
        patch(op.DENSE, "compiled", set())
        yield noted


def _step(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in torch.zeros(3, 1, 2, length, 16, dtype=torch.float16))
    o = load_op("causal")(q, k, v)
    torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def test_a_backward_is_compiled_beside_its_forward(compiled: Compilations) -> None:
    _step(80)
    assert compiled.here == FORWARD
    assert compiled.ahead == BACKWARD
    assert set(compiled.launched) == FORWARD | BACKWARD
    assert compiled.launchers == compiled.launched
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def test_once(compiled: Compilations) -> None:
    """Calls of a kind that was begun begin nothing."""
    kernels = importlib.import_module("generated.causal.torch_op").DENSE
    with mock.patch.object(ahead, "Ahead") as begun:
        for length in (81, 82, 82):
            _step(length)
        begun.assert_called_once()
        kernels.ahead.clear()
    assert compiled.here == FORWARD | BACKWARD


@pytest.mark.usefixtures("compiled")
def test_no_gradients_no_backward() -> None:
    x = torch.zeros(1, 2, 83, 16, dtype=torch.float16)
    with mock.patch.object(ahead, "Ahead") as begun:
        load_op("causal")(x, x, x)
        with torch.no_grad():
            load_op("causal")(x.requires_grad_(), x, x)
        begun.assert_not_called()


def test_a_failure_is_left_to_the_call(compiled: Compilations) -> None:
    """A thread that fails says nothing: the call compiles what it launches, and raises what there is to raise."""
    with mock.patch.object(JITFunction, "warmup", side_effect=RuntimeError("of a thread")) as failed:
        _step(84)
    assert failed.call_count == len(BACKWARD)
    assert compiled.here == FORWARD | BACKWARD


def test_a_system_without_threads(compiled: Compilations) -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        _step(86)
    assert compiled.here == FORWARD | BACKWARD


@pytest.mark.usefixtures("compiled")
def test_an_error_is_raised_by_the_call() -> None:
    with mock.patch.object(JITFunction, "run", side_effect=RuntimeError("it does not compile")):
        q = torch.zeros(1, 2, 85, 16, dtype=torch.float16, requires_grad=True)
        with pytest.raises(RuntimeError, match="it does not compile"):
            load_op("causal")(q, q, q)


def test_what_compiles_side_by_side_leaves_no_filters() -> None:
    before = warnings.filters
    with warnings.catch_warnings():
        mine = warnings.filters
        one, two = warnings.catch_warnings(), warnings.catch_warnings()
        one.__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        two.__enter__()
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        one.__exit__(None, None, None)
        two.__exit__(None, None, None)
        assert list(warnings.filters) != list(mine)
        ahead.restore_filters(mine)
        assert warnings.filters is mine
        warnings.simplefilter("error", UserWarning)
        changed = list(warnings.filters)
        ahead.restore_filters(before)
        assert list(warnings.filters) == changed
