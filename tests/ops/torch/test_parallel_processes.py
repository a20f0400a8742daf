"""Context parallelism between two processes of torch.distributed with gloo: one pair of processes for all cases."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from codegen.testing import calls
from generated._runtime.torch.parallel.tape import Tape
from generated.torch_parallel import context_parallel, plan

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

RANKS, SEQ, HEADS, DIM = 2, 72, (4, 2), 16
SECONDS = 300


def inputs_of(variant: str, dtype: torch.dtype = torch.float32) -> calls.Inputs:
    shape = calls.Shape(batch=2, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=DIM)
    return calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=dtype, device="cpu")


def training_step(mesh: Any, variant: str, strategy: str, dtype: torch.dtype = torch.float32, **wrap: bool) -> None:
    """Results and gradients of this rank's rows against those of the whole call."""
    inputs, op = inputs_of(variant, dtype), calls.load_op(variant)
    want = calls.evaluate(op, inputs)
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy)
    q, k, v = (layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    own = {
        name: (layout.shard(x.detach(), 1) if name == "g" else x.detach().clone()).requires_grad_(x.requires_grad)
        for name, x in inputs.tensors.items()
    }
    call = context_parallel(op, layout)

    def computed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return call(q, k, v, **own, **inputs.scalars, return_lse=True)

    o, lse = checkpoint(computed, q, k, v, use_reentrant=False) if wrap.get("checkpointed") else computed(q, k, v)
    leaves = {"q": q, "k": k, "v": v, **{name: x for name, x in own.items() if x.requires_grad}}
    given = (layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2))
    found = torch.autograd.grad((o, lse), list(leaves.values()), given)
    got = {"o": o, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    for name, wanted in want.items():
        axis = {"dg": 1}.get(name, 2)
        is_local = got[name].shape != wanted.shape
        whole = layout.unshard(got[name].detach(), axis) if is_local else got[name]
        error = (whole.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error < 2 * calls.BOUND[dtype], f"{variant} by {strategy}: {name}: {error:.1e}"


def distributed_tensors(mesh: Any, *, sums: bool) -> None:
    """DTensors with sharded rows give the loss and gradients of plain local rows; parameters are replicated."""
    inputs, op = inputs_of("alibi"), calls.load_op("alibi")
    want = calls.evaluate(op, inputs)
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
    q, k, v = (
        DTensor.from_local(layout.shard(x.detach(), 2), mesh, [Shard(2)]).requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v)
    )
    slope = distribute_tensor(inputs.tensors["slope"].detach(), mesh, [Replicate()]).requires_grad_()
    call = context_parallel(op, layout, sum_gradients=sums)
    o, lse = call(q, k, v, slope=slope, return_lse=True)
    assert o.placements == lse.placements == (Shard(2),)
    do, dlse = (DTensor.from_local(layout.shard(x, 2), mesh, [Shard(2)]) for x in (inputs.do, inputs.dlse))
    found = torch.autograd.grad((o, lse), (q, k, v, slope), (do, dlse))
    traced = torch.compile(
        lambda q, k, v, slope: call(q, k, v, slope=slope, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    of_graph: Any = torch.autograd.grad(traced(q, k, v, slope), (q, k, v, slope), (do, dlse))
    assert all(torch.equal(x.full_tensor(), y.full_tensor()) for x, y in zip(of_graph, cast(Any, found), strict=True))
    got = dict(zip(("dq", "dk", "dv", "dslope"), found, strict=True)) | {"o": o.detach(), "lse": lse.detach()}
    for name, x in got.items():
        whole = x.full_tensor() if name == "dslope" else layout.unshard(x.to_local(), 2)
        error = (whole - want[name]).abs().max() / want[name].abs().max()
        assert error < 2 * calls.BOUND[torch.float32], f"{name}: {error:.1e}"
    with pytest.raises(ValueError, match=r"alibi: q: expected Shard\(2\), its rows, on the ranks of the layout, got"):
        call(distribute_tensor(torch.zeros(2, 4, 8, DIM), mesh, [Replicate()]), k, v, slope=slope)
    with pytest.raises(TypeError, match=r"alibi: q: expected a local tensor: .*`context_parallel`.*, got a DTensor"):
        op(q, k, v, slope=slope)
    with pytest.raises(TypeError, match=r"alibi: slope: expected a local tensor: .*, got a DTensor"):
        op(inputs.q, inputs.k, inputs.v, slope=slope)


def tensors_on_other_dims() -> None:
    """Ranks with other batch rows or heads each have a part of the gradient of a tensor that all of them have whole."""
    by_batch = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "cp"))
    by_heads = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("cp", "tp"))
    inputs, op, whole = inputs_of("alibi"), calls.load_op("alibi"), [Replicate(), Replicate()]
    want = calls.evaluate(op, inputs)
    placed = [Shard(0), Shard(2)]
    for sums in (True, False):
        layout = plan(op, by_batch["cp"], seq=SEQ, heads=HEADS, head_dim=DIM)
        q, k, v, do = (
            distribute_tensor(x.detach(), by_batch, placed) for x in (inputs.q, inputs.k, inputs.v, inputs.do)
        )
        slope = distribute_tensor(inputs.tensors["slope"].detach(), by_batch, whole).requires_grad_()
        o, lse = context_parallel(op, layout, sum_gradients=sums)(q, k, v, slope=slope, return_lse=True)
        dlse = distribute_tensor(inputs.dlse, by_batch, placed)
        (found,) = torch.autograd.grad((o, lse), slope, (do, dlse))
        assert isinstance(found, DTensor)
        assert found.placements[0].is_replicate() is sums
        torch.testing.assert_close(found.full_tensor(), want["dslope"], rtol=1e-4, atol=1e-4)

    causal = calls.load_op("causal")
    all_q, all_k = inputs.q.detach(), inputs.k.detach()
    layout = plan(causal, by_heads["cp"], seq=SEQ, heads=(2, 1), head_dim=DIM)
    call, placed = context_parallel(causal, layout), [Shard(2), Shard(1)]
    one = all_k[:, :1].requires_grad_()
    (want_dk,) = torch.autograd.grad(causal(all_q, one, one).sum(), one)
    single = distribute_tensor(one.detach(), by_heads, [Shard(2), Replicate()]).requires_grad_()
    (dk,) = torch.autograd.grad(
        call(distribute_tensor(all_q, by_heads, placed), single, single).to_local().sum(), single
    )
    assert isinstance(dk, DTensor)
    torch.testing.assert_close(dk.full_tensor(), want_dk, rtol=1e-4, atol=1e-4)
    sharded, copied = (distribute_tensor(all_k, by_heads, each) for each in (placed, [Shard(2), Replicate()]))
    queries, same = (distribute_tensor(all_q, by_heads, each) for each in (placed, [Shard(2), Replicate()]))
    columns = distribute_tensor(all_q, by_heads, [Shard(2), Shard(3)])
    for operands, text in (
        ((queries, copied, copied), r"k: expected Shard\(1\), as q's heads, got Replicate"),
        ((same, sharded, sharded), r"k: expected Replicate\(\), as q, got Shard\(dim=1\)"),
        ((columns, columns, columns), r"q: expected Shard\(0\) or Shard\(1\) or Replicate\(\) on ranks outside of the"),
    ):
        with pytest.raises(ValueError, match=text):
            call(*operands)
    slope = distribute_tensor(torch.ones(HEADS[0]), by_heads, [Shard(0), Replicate()])
    with pytest.raises(
        ValueError, match=r"alibi: slope: expected Replicate\(\), on the ranks of the layout, got Shard"
    ):
        context_parallel(op, layout)(queries, sharded, sharded, slope=slope)


class Layer(nn.Module):
    """Projections around attention with a trained slope, over the rows of this rank."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend, self.width = attend, HEADS[0] * DIM
        self.project = nn.Linear(self.width, (HEADS[0] + 2 * HEADS[1]) * DIM, bias=False)
        self.slope = nn.Parameter(torch.linspace(0.1, 0.4, HEADS[0]))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS[0], HEADS[1], HEADS[1]], 2)
        found: Tensor = self.attend(q, k, v, slope=self.slope, layout="bshd")
        return found


def sharded_parameters(mesh: Any) -> None:
    """FSDP2 over the same ranks: gradients are means over ranks, so they are those of one process divided by RANKS."""
    op = calls.load_op("alibi")
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
    torch.manual_seed(0)
    x, one = torch.randn(2, SEQ, HEADS[0] * DIM), Layer(op)
    one(x).square().sum().backward()
    several = Layer(context_parallel(op, layout, sum_gradients=False))
    several.load_state_dict(one.state_dict())
    fully_shard(several, mesh=mesh)
    checkpoint(several, layout.shard(x, 1), use_reentrant=False).square().sum().backward()
    want: dict[str, Any] = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in several.named_parameters():
        got: Any = parameter.grad
        error = (got.full_tensor() * RANKS - want[name]).abs().max() / want[name].abs().max()
        assert error < 2 * calls.BOUND[torch.float32], f"{name}: {error:.1e}"


def dropped_heads() -> None:
    """DTensors with their heads sharded drop what the whole call drops."""
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("cp", "tp"))
    inputs, op = inputs_of("causal_dropout"), calls.load_op("causal_dropout")
    layout = plan(op, mesh["cp"], seq=SEQ, heads=(HEADS[0] // RANKS, HEADS[1] // RANKS), head_dim=DIM)
    whole = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    rank = mesh.get_local_rank("tp")
    q, k, v = (DTensor.from_local(x.chunk(RANKS, 1)[rank], mesh, [Shard(2), Shard(1)]) for x in whole)
    o = context_parallel(op, layout)(q, k, v, **inputs.scalars)
    torch.testing.assert_close(o.to_local(), op(*whole, **inputs.scalars).chunk(RANKS, 1)[rank])


def compiled(mesh: Any) -> None:
    """A whole graph over processes, with the bits of an eager call."""
    inputs, op = inputs_of("causal"), calls.load_op("causal")
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
    call = context_parallel(op, layout)
    leaves = [layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = call(q, k, v).square().sum()
        return found

    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def grids_of_processes() -> None:
    """Nodes of one rank, and one node of two."""
    for sizes in ((RANKS, 1), (1, RANKS)):
        training_step(init_device_mesh("cpu", sizes, mesh_dim_names=("node", "gpu")), "alibi", "2d")


def noted_steps(mesh: Any, strategy: str) -> None:
    """Calls that are recorded, and replayed with other values, use the group's collectives as the first call did."""
    op = calls.load_op("causal")
    call = context_parallel(op, layout := plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy))
    for number in range(3):
        torch.manual_seed(number)
        q, k, v = (torch.randn(1, heads, SEQ, DIM) for heads in (HEADS[0], *[HEADS[1]] * 2))
        rows = [layout.shard(x, 2).requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(call(*rows).square().sum(), rows)
        whole = [x.requires_grad_() for x in (q, k, v)]
        for got, want in zip(found, torch.autograd.grad(op(*whole).square().sum(), whole), strict=True):
            assert torch.allclose(layout.unshard(got, 2), want, atol=1e-5), f"{strategy}, call {number}"
    assert all(isinstance(tape, Tape) for tape in call._tapes.values())


def models_are_copied(mesh: Any) -> None:
    """As for a moving average of parameters. A process group cannot be copied, and a copy needs none of its own."""
    op = calls.load_op("alibi")
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM)
    model = Layer(context_parallel(op, layout))
    assert deepcopy(model).attend is model.attend
    assert deepcopy(layout) is layout


def raises_on_every_rank(mesh: Any) -> None:
    op = calls.load_op("causal")
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM)
    rank = mesh.get_local_rank()
    q = torch.zeros(1, 4, layout.local - rank, DIM)
    with pytest.raises(ValueError, match=r"causal: q: expected 36 rows|rank 1 raised ArgumentError"):
        context_parallel(op, layout)(q, q, q)


def a_tensor_on_another_device_is_refused_on_every_rank(mesh: Any) -> None:
    """As one that a process makes on the default device: on one rank it may be the right one."""
    op = calls.load_op("alibi")
    layout = plan(op, mesh, seq=SEQ, heads=(4, 4), head_dim=DIM, strategy="heads", balance="zigzag")
    q = torch.zeros(1, 4, layout.local, DIM)
    slope = torch.zeros(4, device="meta" if mesh.get_local_rank() == 1 else "cpu")
    with pytest.raises(ValueError, match=r"alibi: slope: expected device cpu, that of q, got meta"):
        context_parallel(op, layout)(q, q, q, slope=slope)


def does_not_wait_for_a_rank_that_is_gone(group: Any) -> None:
    """If a rank fails after the check of arguments and ends, the collective of the other raises an error at once."""
    op = calls.load_op("causal")
    layout = plan(op, group, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
    call = context_parallel(op, layout)
    q, k = torch.zeros(1, 4, layout.local, DIM), torch.zeros(1, 2, layout.local, DIM)
    call(q, k, k)
    if dist.get_rank() == 1:
        return
    begun = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|peer"):
        call(q, k, k)
    assert time.perf_counter() - begun < SECONDS / 4


def one_process(rank: int, folder: str) -> None:
    """Run all cases on one rank, and write failures to a file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    try:
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
        raises_on_every_rank(mesh["cp"])
        a_tensor_on_another_device_is_refused_on_every_rank(mesh["cp"])
        for variant in ("causal", "alibi", "forgetting", "gpt_oss"):
            for strategy in ("heads", "gather", "exchange", "ring"):
                training_step(mesh["cp"], variant, strategy)
        training_step(mesh["cp"], "causal", "gather", torch.bfloat16)
        training_step(mesh["cp"].get_group(), "forgetting", "gather", checkpointed=True)
        training_step(mesh["cp"], "causal", "heads", checkpointed=True)
        training_step(mesh["cp"], "gpt_oss", "ring", checkpointed=True)
        for strategy in ("heads", "gather", "exchange", "ring"):
            noted_steps(mesh["cp"], strategy)
        grids_of_processes()
        dropped_heads()
        tensors_on_other_dims()
        compiled(mesh["cp"])
        sharded_parameters(mesh["cp"])
        models_are_copied(mesh["cp"])
        for sums in (True, False):
            distributed_tensors(mesh["cp"], sums=sums)
        three = init_device_mesh("cpu", (1, 1, RANKS), mesh_dim_names=("a", "b", "c"))
        with pytest.raises(ValueError, match="plan: mesh: expected a mesh of one dim"):
            plan(calls.load_op("causal"), three, seq=SEQ, heads=HEADS, head_dim=DIM)
        dist.barrier()
        does_not_wait_for_a_rank_that_is_gone(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    begun = time.perf_counter()
    # An error of a process ends the other one and is raised here.
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # which torch does not name in __all__
    spawn(one_process, (str(tmp_path),), nprocs=RANKS)
    assert time.perf_counter() - begun < SECONDS
