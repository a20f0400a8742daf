"""Another process compiles the kernels of a first call and of its backward; no GPU is needed."""

from __future__ import annotations

import importlib
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="what is compiled ahead are Triton's kernels")

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from codegen.compile.offline import AbsentGPU, target_of
from codegen.testing.golden import load_op
from generated._runtime.core import compiling
from generated._runtime.torch import ahead, launching, plans
from generated._runtime.torch import replay as torch_replay

pytestmark = pytest.mark.skipif(not ahead.ENABLED, reason="nothing is compiled here")
ARCH = "sm_80"  # Portable kernels, which compile fastest.
FORWARD, BACKWARD = {"causal_fwd"}, {"causal_bwd_dq", "causal_bwd_dkdv"}


class Compilations:
    """The names of kernels that the process compiled, and of those that it found in Triton's cache."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.found: set[str] = set()

    def note(self, *, metadata: Any, cache_hit: bool, **_: Any) -> None:
        """Triton calls this for each kernel."""
        (self.found if cache_hit else self.here).add(metadata["name"])


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Compilations]:
    """Calls on CPU tensors compile the kernels that they would launch on a GPU, into a separate cache."""
    noted = Compilations()

    def load(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = 1, 1, lambda *_: None

    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        op = importlib.import_module("generated.causal.torch_op")
        patch(op, "runs_reference", lambda _q: False)
        devices = importlib.import_module("generated._runtime.torch.devices")
        patch(devices, "arch_of", lambda _x: ARCH)
        patch(devices, "gpu_of", lambda _x: "")
        patch(driver, "_active", AbsentGPU.__new__(AbsentGPU))
        AbsentGPU.__init__(driver._active, ARCH)  # a new number each time: kernels key their compilations by it
        patch(CompiledKernel, "_init_handles", load)
        patch(torch_replay, "_is_current", lambda _x: True)
        patch(plans, "current_stream", lambda _device: 0)
        patch(ahead, "_runs_on_gpu", lambda _q: True)
        patch(ahead, "target_of", lambda _device: target_of(ARCH))
        patch(torch.cuda, "device", lambda _index: nullcontext())
        patch(knobs.cache, "dir", str(tmp_path))
        patch(knobs.compilation, "listener", noted.note)
        patch(op.DENSE, "compiled", set())
        yield noted


def _step(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in torch.zeros(3, 1, 2, length, 16, dtype=torch.float16))
    o = load_op("causal")(q, k, v)
    torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def test_a_call_and_its_backward_are_compiled_by_a_process(compiled: Compilations) -> None:
    _step(80)
    assert compiled.here == set()
    assert compiled.found == FORWARD | BACKWARD
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def test_once(compiled: Compilations) -> None:
    """If compilation began for a kind of call, later calls of this kind do not begin another one."""
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


@pytest.mark.parametrize(
    ("length", "name", "value"),
    [
        (88, "_START", "raise SystemExit('it cannot start')"),
        (89, "job_of", mock.Mock(side_effect=RuntimeError("no kernel of mine"))),
        (90, "json", mock.Mock(dumps=mock.Mock(side_effect=OSError("it cannot be told where packages are")))),
    ],
)
def test_a_failure_is_left_to_the_call(length: int, name: str, value: Any, compiled: Compilations) -> None:
    """The call itself compiles the kernels that it launches, and raises their errors."""
    with mock.patch.object(ahead, name, value):
        _step(length)
    assert compiled.here == FORWARD | BACKWARD


def test_a_process_that_hangs_is_ended(compiled: Compilations) -> None:
    make, made = ahead.Ahead, []

    def noted(*args: Any) -> ahead.Ahead:
        made.append(make(*args))
        return made[-1]

    with (
        mock.patch.object(ahead, "_START", "import time; time.sleep(600)"),
        mock.patch.object(ahead, "LIMIT_S", 0.1),
        mock.patch.object(ahead, "Ahead", noted),
    ):
        _step(87)
    assert [each._process and each._process.returncode for each in made] == [-signal.SIGKILL]
    assert compiled.here == FORWARD | BACKWARD


def test_kernels_ask_for_fused_multiply_adds() -> None:
    with mock.patch.object(launching.active, "compiles", mock.Mock()) as compiles:
        launching.launch("kernel", (1,), (torch.zeros(1),), num_warps=4)
    (kernel, grid, (_,), options) = compiles.call_args.args
    assert (kernel, grid, options) == ("kernel", (1,), {"num_warps": 4, "enable_fp_fusion": True})


KEYS = """
import importlib, sys
from contextlib import suppress
import torch
from generated._runtime.torch.launching import launch

names = {"fwd": "fwd", "fwd_wide": "fwd", "bwd": "bwd", "bwd_wide": "bwd", "split_keys": "split", "split_rows": "split"}
modules = {name: importlib.import_module(f"generated.causal.hopper_{module}") for name, module in names.items()}
kernels = {name: getattr(module, f"causal_hopper_{name}") for name, module in modules.items()}
for name in sys.argv[1:]:
    with suppress(Exception):  # without its arguments no kernel is launched
        launch(kernels[name], (1,), (torch.zeros(1),))
print(*(kernels[name].hash for name in names))
"""


def test_the_key_of_a_kernel_does_not_depend_on_those_before_it() -> None:
    """Otherwise a process does not find what another one compiled: Hopper's kernels share functions of one library."""
    names = ["fwd", "fwd_wide", "bwd", "bwd_wide", "split_keys", "split_rows"]
    orders = names, names[::-1]
    commands = [[sys.executable, "-c", KEYS, *order] for order in orders]
    first, second = (subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands)
    assert first == second
    assert len(set(first.split()) - {"None"}) == len(names)


def test_it_ends_with_its_caller() -> None:
    """The input of the process ends when its caller ends, for whatever reason."""
    command = [sys.executable, "-c", ahead._START, json.dumps(sys.path), compiling.__name__]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        assert process.stdin is not None
        hangs = compiling.Job("time", "sleep", {}, {}, {}, {})
        process.stdin.write(pickle.dumps(compiling.Order([hangs], [], None, "")) + pickle.dumps(""))
        process.stdin.close()
        assert process.wait(30) in (0, 1)


def test_its_copies_end_with_its_caller(tmp_path: Path) -> None:
    """Copies of the process compile; the copy of this test hangs while it looks for its kernel."""
    note = "pathlib.Path(__file__).with_name('pid').write_text(f'{os.getpid()} ')"
    code = f"import os, pathlib, time\ndef __getattr__(_name):\n    {note}\n    time.sleep(600)\n"
    (tmp_path / "hanging.py").write_text(code)
    command = [sys.executable, "-c", ahead._START, json.dumps([str(tmp_path), *sys.path]), compiling.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        hangs = compiling.Job("hanging", "kernel", {}, {}, {}, {})
        process.stdin.write(pickle.dumps(compiling.Order([hangs], [], None, "")) + pickle.dumps(""))
        process.stdin.flush()
        assert _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "))
        copy = int((tmp_path / "pid").read_text())
        assert copy != process.pid
        process.kill()
        assert _runs(copy)
        process.stdin.close()
    assert _until(lambda: not _runs(copy))


def _runs(process: int) -> bool:
    """Whether a process still runs. A process that has ended keeps a status until somebody waits for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(holds: Callable[[], bool]) -> bool:
    """Whether a condition becomes true within 30 seconds."""
    end = time.monotonic() + 30
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


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


@triton.jit  # type: ignore[untyped-decorator]
def _nested_loops(out_ptr, n, DEPTHS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would read the types
    total, other, last = 0, 1.0, 0
    for i in range(n):
        for part in tl.static_range(DEPTHS):
            for j in range(i):
                if part == 1:
                    other += j
                while total < n:
                    total += tl.load(out_ptr + j)
                    last = part
        total -= 1
    tl.store(out_ptr, total + last + other)


def test_loops_that_are_visited_once_give_the_same_code() -> None:
    code, visits = _code_of_loops()
    same, fewer = _code_of_loops(once=True)
    assert same == code
    # `static_range` unrolls: each part has its own two inner loops.
    # Triton 3.6 needs 13 visits by itself, Triton 3.9 needs 11.
    assert fewer == 5 < visits


def _code_of_loops(*, once: bool = False) -> tuple[str, int]:
    """Triton's code of nested loops, and how often their bodies are visited to find the values that they carry."""
    from triton._C.libtriton import ir
    from triton.compiler.code_generator import CodeGenerator

    backend = make_backend(target_of(ARCH))
    visits = []
    find = CodeGenerator._find_carries

    def counted(*args: Any, **kwargs: Any) -> Any:
        visits.append(args)
        return find(*args, **kwargs)

    with mock.patch.object(CodeGenerator, "_find_carries", counted):
        if once:
            compiling.visit_loops_once()
        source = ASTSource(_nested_loops, {"out_ptr": "*i32", "n": "i32", "DEPTHS": "constexpr"}, {(2,): 2})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        options = backend.parse_options({})
        code = source.make_ir(
            target_of(ARCH), options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )
        return str(code), len(visits)
