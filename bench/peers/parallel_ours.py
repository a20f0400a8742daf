"""Our ops on one GPU and over several, on the cases of the parallel suite, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.cases.parallel import ParallelCase
from codegen.testing.calls import Inputs, Shape, draw_inputs, load_manifest, load_op, load_reference, packed
from generated._runtime.core.parallel.costs import Machine
from generated._runtime.core.parallel.plan_requests import STRATEGIES
from generated.torch_parallel import Layout, context_parallel, plan


def strategies() -> tuple[str, ...]:
    """All strategies of the library's plan, except "auto", which chooses among them."""
    return tuple(name for name in STRATEGIES if name != "auto")


def machine_of(rates: Mapping[str, float]) -> Machine:
    """A machine with these rates, and the library's defaults for the others."""
    default = Machine()
    return Machine(**{name: type(getattr(default, name))(rate) for name, rate in rates.items()})


def nodes_of(strategy: str, ranks: int, machine: Machine) -> int:
    """The number of nodes of the mesh that a strategy needs: 0 for a mesh of one dim, which all need but "2d".

    At most one node's worth of ranks is split into two nodes. If nodes do not divide the ranks, "2d" has 0 nodes, which
    the plan refuses.
    """
    node: int = getattr(machine, "node", 8)
    nodes = ranks // node if ranks > node else 2
    return nodes if strategy == "2d" and ranks > 2 and ranks % nodes == 0 else 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """An op with its arguments. Gradients are computed for the tensors in `leaves`; `do` is the gradient of o."""

    op: Callable[..., Any]
    leaves: Mapping[str, Tensor]
    do: Tensor
    given: Mapping[str, Any] = field(default_factory=dict)

    def forward(self, **more: Any) -> Any:
        """o as a training step computes it: the tensors that the backward needs are saved."""
        return self.op(**self.leaves, **self.given, **more)

    def both(self) -> tuple[Tensor, ...]:
        """The gradients of all leaves, after a forward."""
        return torch.autograd.grad(self.forward(), list(self.leaves.values()), self.do)

    def results(self, **more: Any) -> dict[str, Tensor]:
        """o, lse and all gradients."""
        o, lse = self.forward(return_lse=True, **more)
        gradients = torch.autograd.grad(o, list(self.leaves.values()), self.do)
        named = {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}
        return {"o": o.detach(), "lse": lse.detach(), **named}


@dataclass(frozen=True)
class Captured:
    """The passes of a call, each in a CUDA graph: their time has no part of the host."""

    forward: Callable[[], None]
    both: Callable[[], None]

    @classmethod
    def of(cls, call: Call) -> Captured:
        """Capture the passes of a call. The call must have run before, as a capture requires."""
        return cls(_captured(call.forward), _captured(call.both))


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(_results: Any = kept) -> None:
        graph.replay()

    return replay


def draw(case: ParallelCase, device: str, dtype: torch.dtype) -> Inputs:
    """The arguments of the whole call, the same on every rank; packed if the case has documents."""
    shape = Shape(batch=1, heads=case.heads[0], kv_heads=case.heads[1], seq=case.seq, dim=case.dim)
    entry = load_manifest()[case.variant]
    inputs = draw_inputs(entry, shape, dtype=dtype, device=device, scalars=dict(case.scalars))
    return packed(entry, inputs) if case.documents else inputs


def _call(op: Callable[..., Any], leaves: Mapping[str, Tensor], inputs: Inputs) -> Call:
    rest = {name: x for name, x in inputs.tensors.items() if name not in leaves}
    return Call(op=op, leaves=leaves, do=inputs.do, given={**rest, **dict(inputs.scalars)})


def one_gpu(case: ParallelCase, inputs: Inputs, op: Callable[..., Any] | None = None) -> Call:
    """The whole call, unsharded; with another `op` of the same arguments, such as a reference."""
    call = _call(op or load_op(case.variant), inputs.leaves(), inputs)
    if not case.documents:
        return call
    begins = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=inputs.q.device)
    return Call(op=call.op, leaves=call.leaves, do=call.do, given={**call.given, "cu_seqlens_q": begins})


def reference(case: ParallelCase, inputs: Inputs) -> Call:
    """The plain mathematics of the whole call in float32; in float64 if the inputs are float32."""
    dtype = torch.float64 if inputs.q.dtype == torch.float32 else torch.float32

    def single(x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x

    q, k, v, do, dlse = (single(x) for x in (inputs.q, inputs.k, inputs.v, inputs.do, inputs.dlse))
    tensors = {name: single(x) for name, x in inputs.tensors.items()}
    exact = Inputs(q=q, k=k, v=v, do=do, dlse=dlse, tensors=tensors, scalars=inputs.scalars)
    return one_gpu(case, exact, load_reference(case.variant, packed=bool(case.documents)))


def row_axis(case: ParallelCase, name: str) -> int:
    """The axis of rows of an argument, a result or a gradient; -1 for a tensor without one."""
    if name == "lse":
        return 1 if case.documents else 2
    if name.removeprefix("d") in ("q", "k", "v", "o"):
        return 0 if case.documents else 2
    if name.removeprefix("d") == "g":
        return 0 if case.documents else 1
    return -1


def make_plan(case: ParallelCase, mesh: Any, strategy: str, machine: Machine) -> Layout:
    """The layout of a case. `mesh` may be the number of ranks, also for the strategy "2d"."""
    if isinstance(mesh, int) and (nodes := nodes_of(strategy, mesh, machine)):
        mesh = (nodes, mesh // nodes)
    given: dict[str, Any] = dict(case.scalars)
    if case.documents:
        given["cu_seqlens"] = case.cu_seqlens
    return plan(
        load_op(case.variant),
        mesh,
        seq=case.seq,
        heads=case.heads,
        head_dim=case.dim,
        strategy=strategy,
        machine=machine,
        **given,
    )


def sharded(case: ParallelCase, inputs: Inputs, layout: Layout, rank: int) -> Call:
    """The call of one rank under a layout."""

    def local(name: str, x: Tensor) -> Tensor:
        axis = row_axis(case, name)
        return x.detach().clone() if axis < 0 else layout.shard(x.detach(), axis, rank=rank)

    leaves = {name: local(name, x).requires_grad_() for name, x in inputs.leaves().items()}
    call = _call(context_parallel(load_op(case.variant), layout), leaves, inputs)
    return Call(op=call.op, leaves=call.leaves, do=local("o", inputs.do), given=call.given)


def squared_errors(
    case: ParallelCase, got: Mapping[str, Tensor], want: Mapping[str, Tensor], layout: Layout | None, rank: int
) -> dict[str, tuple[float, float]]:
    """For each result the sums of squared errors and of squares, over a rank's rows (without a layout: over all)."""
    found = {}
    for name, x in got.items():
        axis = row_axis(case, name)
        wanted = want[name]
        if layout is not None and axis >= 0:
            wanted = layout.shard(wanted, axis, rank=rank)
        found[name] = (float((x.double() - wanted.double()).square().sum()), float(wanted.double().square().sum()))
    return found


def relative(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The norm of each result's error over the norm of the wanted result, from the sums of every rank."""
    found = {}
    for name in parts[0]:
        wrong, size = (sum(part[name][i] for part in parts) for i in range(2))
        found[name] = (wrong / size) ** 0.5 if size > 0 else wrong**0.5
    return found
