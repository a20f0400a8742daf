"""A replayed call passes to the launchers of compiled kernels the arguments that Triton passes; no GPU is needed."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="what is replayed are Triton's launches")

import torch
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver

from codegen.compile.offline import AbsentGPU
from codegen.testing.golden import Shape, draw_inputs, load_manifest, load_op
from generated._runtime.torch import launching, plans
from generated._runtime.torch import replay as torch_replay

pytestmark = pytest.mark.skipif(not launching.ENABLED, reason="nothing is replayed here")
ARCH = "sm_90"


def _plainly(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, Tensor) else x


@pytest.fixture
def launches(request: pytest.FixtureRequest) -> Iterator[list[list[Any]]]:
    """The launches of some variants: grid, stream, function, metadata, and the arguments of the kernel."""
    noted: list[list[Any]] = []
    is_known = getattr(request, "param", "known") == "known"
    if is_known and launching._KNOWN_LAUNCHER is None:
        pytest.skip("of this version of Triton no launcher is known")
    # The places in between are the hooks and their arguments.
    plain = [*range(10), *range(13, 99)] if is_known else [*range(6), *range(9, 99)]

    def launcher(*arguments: Any) -> None:
        noted.append([_plainly(arguments[i]) for i in plain if i < len(arguments)])

    def load(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = 1, hash(kernel.name), launcher
        if is_known:
            kernel._run = object.__new__(CudaLauncher)
            kernel._run.__dict__.update(kernel.metadata._asdict(), launch=launcher)

    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        for variant in ("causal", "document", "causal_dropout"):
            patch(importlib.import_module(f"generated.{variant}.torch_op"), "runs_reference", lambda _q: False)
        patch(importlib.import_module("generated._runtime.torch.devices"), "arch_of", lambda _x: ARCH)
        patch(driver, "_active", AbsentGPU(ARCH))
        patch(CompiledKernel, "_init_handles", load)
        patch(launching, "_scratch", lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8))
        patch(torch_replay, "_is_current", lambda _x: True)
        patch(plans, "current_stream", lambda _device: 0)
        yield noted


@pytest.mark.parametrize(("launches", "seq"), [("known", 200), ("any", 201)], indirect=["launches"])
@pytest.mark.parametrize(("variant", "count"), [("causal", 1), ("document", 3), ("causal_dropout", 1)])
def test_launchers_get_what_triton_gives_them(variant: str, count: int, seq: int, launches: list[list[Any]]) -> None:
    shape = Shape(batch=2, heads=2, kv_heads=1, seq=seq, dim=80)
    inputs = draw_inputs(load_manifest()[variant], shape, dtype=torch.bfloat16, device="cpu")
    op = load_op(variant)
    kept = []  # Allocated tensors are kept, so that each has its own address.
    empty = torch.empty_strided
    made: list[Tensor] = []

    def noted_empty(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    with torch.no_grad():
        for _ in range(2):
            kept.append(inputs.call(op))
        assert len(launches) == 2 * count
        ordinary = launches[count:]
        launches.clear()
        with mock.patch.object(torch, "empty_strided", noted_empty):
            kept.append(inputs.call(op))
    assert made, "the call was not replayed"
    given = {_plainly(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.tensors.values())}
    fresh = [range(x.data_ptr(), x.data_ptr() + max(x.nbytes, 1)) for x in made]

    def is_fresh(x: Any) -> bool:
        return isinstance(x, int) and any(x in memory for memory in fresh)

    assert len(launches) == count
    for got, want in zip(launches, ordinary, strict=True):
        assert len(got) == len(want)
        for x, wanted in zip(got, want, strict=True):
            assert x == wanted or (is_fresh(x) and wanted not in given)
            assert type(x) is type(wanted)
        assert sum(x in given or is_fresh(x) for x in got) >= 4


def test_a_hook_makes_triton_launch(launches: list[list[Any]]) -> None:
    from triton import knobs

    shape = Shape(batch=1, heads=1, kv_heads=1, seq=64, dim=64)
    inputs = draw_inputs(load_manifest()["causal"], shape, dtype=torch.bfloat16, device="cpu")
    op = load_op("causal")

    def hook(_metadata: Any) -> None:
        """A hook that the launcher would call."""

    with torch.no_grad(), mock.patch.object(plans.Plan, "__call__") as replay:
        for _ in range(2):
            inputs.call(op)
        knobs.runtime.launch_enter_hook.add(hook)
        try:
            inputs.call(op)
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        assert len(launches) == 3
        replay.assert_not_called()
        inputs.call(op)
        replay.assert_called_once()


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_a_call_with_gradients_is_replayed(layout: str) -> None:
    """From the third call on only its launches are done; autograd sees the same graph, and results may be changed."""
    ends = torch.tensor([0, 24, 64], dtype=torch.int32)
    options: dict[str, Any] = {"cu_seqlens_q": ends} if layout == "packed" else {"layout": layout}
    shape = {"bhsd": (1, 4, 64, 32), "bshd": (1, 64, 4, 32), "packed": (64, 4, 32)}[layout]
    op = load_op("causal")
    # Values are not checked, because no launch computes them.
    with (
        mock.patch("generated._runtime.torch.sequences.values_are_checked", return_value=False),
        mock.patch.object(plans.Step, "__call__", autospec=True, side_effect=plans.Step.__call__) as step,
    ):
        seen = []
        for _ in range(4):
            q, k, v = (x.requires_grad_() for x in torch.randn(3, *shape, dtype=torch.bfloat16))
            o, lse = op(q, k, v, return_lse=True, **options)
            grads = torch.autograd.grad((o, lse), (q, k, v), (o.detach(), lse.detach()))
            nodes = [o.grad_fn.name(), lse.grad_fn.name(), *(x[0].name() for x in o.grad_fn.next_functions if x[0])]
            seen.append((nodes, [(x.shape, x.stride(), x.dtype) for x in (o, lse, *grads)]))
            changed = op(q, k, v, **options)
            changed.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                changed.backward(o.detach())
            detached = op(q, k, v.detach(), **options)
            assert torch.autograd.grad(detached, v, o.detach(), allow_unused=True) == (None,)
    assert all(each == seen[0] for each in seen)
    assert step.call_count == 2 + 2 + 2


@pytest.mark.usefixtures("launches")
def test_a_tensor_and_its_detached_self_are_told_apart() -> None:
    q = torch.randn(1, 2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    op = load_op("causal")
    for _ in range(4):
        for k, v in ((q, q.detach()), (q.detach(), q), (q, q.view_as(q)), (q.view_as(q), q)):
            o = op(q, k, v)  # torch 2.11 frees the node's C++ half with its output
            edges = [edge[0] for edge in o.grad_fn.next_functions[:3]]
            for x, edge in zip((q, k, v), edges, strict=True):
                assert (edge is not None) == x.requires_grad
                assert not x.requires_grad or "AccumulateGrad" in edge.name() or edge is x.grad_fn


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_backward_is_replayed(with_lse: bool) -> None:
    """Once a backward is recorded, only its recorded steps are done; one of another kind is computed as usual."""
    op = load_op("causal")
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 72 + with_lse, 32, dtype=torch.bfloat16))
    do, dlse = torch.ones_like(q), torch.ones(q.shape[:3])
    kernels = importlib.import_module("generated.causal.torch_op").DENSE
    with mock.patch.object(kernels, "backward", wraps=kernels.backward) as computed:
        computed.plan_of = kernels.backward.plan_of

        def count(do: Tensor, **options: Any) -> int:
            results = op(q, k, v, return_lse=True)[: 1 + with_lse]
            before = computed.call_count
            grads = torch.autograd.grad(results, (q, k, v), (do, dlse)[: 1 + with_lse], **options)
            assert [(x.shape, x.stride(), x.dtype) for x in grads] == [
                (x.shape, x.stride(), x.dtype) for x in (q, k, v)
            ]
            return computed.call_count - before

        assert [count(do) for _ in range(5)] == [1, 1, 1, 0, 0]
        assert count(do.transpose(1, 2).contiguous().transpose(1, 2)) == 1
        assert count(torch.ones((), dtype=do.dtype).expand_as(do)) == 1
        assert count(torch.cat([do.flatten(), do.flatten()[:1]])[1:].view_as(do)) == 1  # not at a multiple of 16
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT):
            assert count(do) == 1
        assert count(do) == 0


def test_a_backward_that_splits_heads_is_replayed(launches: list[list[Any]]) -> None:
    """Its launches are those of the computed backward, with the one that adds up the groups' gradients."""
    op = load_op("causal")
    q, k, v = (torch.randn(1, heads, 1024, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 1, 1))
    kernels = importlib.import_module("generated.causal.torch_op").DENSE
    functions = []
    with mock.patch.object(kernels, "backward", wraps=kernels.backward) as computed:
        computed.plan_of = kernels.backward.plan_of
        for _ in range(5):
            o = op(q, k, v)
            launches.clear()
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
            functions.append([launch[4] for launch in launches])
    assert computed.call_count == 3
    assert functions[4] == functions[0]
    assert hash("add_head_groups") in functions[4]


@pytest.mark.usefixtures("launches")
def test_second_derivatives_are_refused_of_replayed_calls() -> None:
    op = load_op("causal")
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 74, 32, dtype=torch.bfloat16))
    for _ in range(5):
        torch.autograd.grad(op(q, k, v), q, torch.ones_like(q))
    (dq,) = torch.autograd.grad(op(q, k, v), q, torch.ones_like(q), create_graph=True)
    with pytest.raises(NotImplementedError, match="causal: second derivatives"):
        dq.sum().backward()


def test_a_replayed_call_reads_the_tables_of_a_copied_schedule(launches: list[list[Any]]) -> None:
    shape = Shape(batch=1, heads=2, kv_heads=2, seq=88, dim=32)
    inputs = draw_inputs(load_manifest()["document"], shape, dtype=torch.bfloat16, device="cpu")
    op: Any = load_op("document")
    schedule = op.schedule(inputs.q, inputs.k, inputs.v, **inputs.tensors)

    def tables_read(schedule: Any) -> set[int]:
        """Which of all tables the launches of a call read."""
        launches.clear()
        inputs.call(op, schedule=schedule)
        return {x for launch in launches for x in launch if x in known}

    known = {x.data_ptr() for x in schedule.tables}
    with torch.no_grad():
        read = [tables_read(schedule) for _ in range(4)]
        assert read[0]
        assert all(each == read[0] for each in read)
        for again in (copy.copy(schedule), copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
            known |= {x.data_ptr() for x in again.tables}
            places = {x.data_ptr(): y.data_ptr() for x, y in zip(schedule.tables, again.tables, strict=True)}
            for _ in range(4):
                assert tables_read(again) == {places[x] for x in read[0]}
            assert tables_read(schedule) == read[0]
