"""Ops whose calls are replayed, also in Triton's interpreter, which has no compiled kernels to launch again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from codegen.testing import golden
from generated._runtime.core.schedules import Schedule
from generated._runtime.torch import plans, recording
from generated._runtime.torch import replay as torch_replay
from generated._runtime.torch.last_call import Alike, LastCall
from tests.support.cases import INTERPRET


@dataclass
class Replays:
    """How many calls were replayed."""

    count: int = 0


class _Memory:
    """Tensors by pointer, kept alive."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}

    def keep(self, values: Sequence[Any]) -> None:
        for x in values:
            if isinstance(x, list):
                self.keep(x)
            elif type(x) is Schedule:
                self.keep([*x.tables, *x.sequences])
            elif type(x) is Tensor:
                self.tensors[x.data_ptr()] = x

    def at(self, pointer: int, dtype: torch.dtype) -> Tensor:
        """The tensor that begins at a pointer, or the rest of a buffer from the pointer on."""
        found = self.tensors.get(pointer)
        if found is not None and found.dtype == dtype:
            return found
        for begin, room in self.tensors.items():
            # A tensor without elements may begin at the end of the buffer.
            if room.dim() == 1 and begin <= pointer <= begin + room.nbytes:
                rest = room.view(torch.int8)[pointer - begin :]
                return rest[: rest.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        raise KeyError(pointer)


class _Interpreted:
    """Replaces a compiled kernel: called like a launcher, with pointers for tensors, it interprets the kernel."""

    function = packed_metadata = None
    metadata = SimpleNamespace(global_scratch_size=0)

    def __init__(self, call: Callable[..., Any], dtypes: Sequence[torch.dtype | None], memory: _Memory) -> None:
        """`dtypes`: the dtype of each argument that is a tensor, None for other arguments."""
        self._call, self._dtypes, self._memory = call, dtypes, memory

    def run(self, *arguments: Any) -> None:
        grid, values = arguments[:3], arguments[9:]
        assert arguments[3:9] == (0, None, None, None, None, None)
        at = self._memory.at
        self._call(
            *(x if dtype is None else at(x, dtype) for x, dtype in zip(values, self._dtypes, strict=True)), grid=grid
        )


@contextmanager
def _interpreter_compiles(variant: str, memory: _Memory) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run, kind_of, empty = InterpretedFunction.run, torch_replay._kind_of, torch.empty_strided
    pointers_of, pointers_alike = LastCall.pointers, Alike.pointers
    # Imported before anything is patched, as they are everywhere else.
    op = importlib.import_module(f"generated.{variant}.torch_op")
    every_mode = [op.DENSE, op.PACKED, op.SEGMENTED]
    for kernels in [*every_mode, *([op.PAGED] if hasattr(op, "PAGED") else [])]:
        _ = kernels.modules.launch

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> _Interpreted:
        with _disable_current_modes():  # The interpreter copies tensors, which no launch does.
            run(kernel, *args, grid=grid, warmup=warmup, **constants)
        values = dict(zip(kernel.arg_names, args, strict=False)) | constants
        given = [values[name] for name in kernel.arg_names]
        dtypes = [x.dtype if isinstance(x, Tensor) else None for x in given]
        return _Interpreted(lambda *values, grid: run(kernel, *values, grid=grid, warmup=False), dtypes, memory)

    def kept_kind(values: Sequence[Any], *others: Any) -> Any:
        memory.keep(values)
        return kind_of(values, *others)

    def kept_pointers(last: LastCall, values: Sequence[Any], names: Any) -> Any:
        memory.keep(values)
        return pointers_of(last, values, names)

    def kept_alike(like: Alike, tensors: Sequence[Tensor]) -> Any:
        memory.keep(tensors)
        return pointers_alike(like, tensors)

    def kept_empty(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        memory.keep([made])
        return made

    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        patch(InterpretedFunction, "run", launched)
        patch(torch, "empty_strided", kept_empty)
        patch(torch_replay, "ENABLED", True)
        patch(recording, "CompiledKernel", _Interpreted)
        patch(torch_replay, "_kind_of", kept_kind)
        patch(LastCall, "pointers", kept_pointers)
        patch(Alike, "pointers", kept_alike)
        patch(torch_replay, "_is_current", lambda _x: True)
        patch(plans, "current_stream", lambda _device: 0)
        for kernels in every_mode:
            for name, parameters in (("forward", kernels.parameters), ("backward", kernels.backward_parameters)):
                patch(kernels, name, torch_replay.replayed(getattr(kernels, name), parameters=parameters))
        yield


@contextmanager
def replaying(variant: str) -> Iterator[tuple[Any, Replays]]:
    """The op of a variant, which replays its calls from the third of a kind on, and the count of its replays."""
    replays, op = Replays(), golden.load_op(variant)
    replay = plans.Plan.__call__

    def counted(plan: Any, given: list[Tensor], pointers: list[int]) -> Any:
        replays.count += 1
        return replay(plan, given, pointers)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(plans.Plan, "__call__", counted))
        if INTERPRET:
            patches.enter_context(_interpreter_compiles(variant, _Memory()))
            yield torch_replay.replayed_op("doc")(op), replays
        else:
            yield op, replays


def kinds_of(function: Any) -> dict[Any, Any]:
    """The plans that a function keeps for its calls, by kind."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    plans: dict[Any, Any] = cells["plans"].cell_contents
    return plans


@contextmanager
def never_replaying() -> Iterator[None]:
    """Triton launches all calls, as it does while a profiler is active."""
    with (
        mock.patch.object(torch_replay, "launches_are_watched", return_value=True),
        mock.patch.object(plans, "launches_are_watched", return_value=True),
    ):
        yield
