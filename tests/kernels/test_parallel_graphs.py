"""CUDA graphs of calls over several ranks: after one call to warm up, nothing waits for the host.

One GPU captures a call of one rank. Two GPUs, or more, capture forward and backward over NCCL:

    python -m pytest tests/kernels/test_parallel_graphs.py -q
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan

HEADS, DIM, SEQ = (8, 4), 64, 2048

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def captured_step(mesh: Any, variant: str, strategy: str) -> None:
    """Forward and backward replayed from a graph, on other values than those captured, give the bits of eager calls."""
    shape = calls.Shape(batch=1, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=DIM)
    inputs = calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=torch.bfloat16, device="cuda")
    op, scalars = calls.load_op(variant), dict[str, Any](inputs.scalars)
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, **scalars)
    call = context_parallel(op, layout)
    leaves = {name: layout.shard(getattr(inputs, name).detach(), 2).requires_grad_() for name in ("q", "k", "v")}
    own = {
        name: (layout.shard(x.detach(), 1) if name == "g" else x.detach().clone()).requires_grad_(x.requires_grad)
        for name, x in inputs.tensors.items()
    }
    do = layout.shard(inputs.do, 2)
    trained = [x for x in (*leaves.values(), *own.values()) if x.requires_grad]

    def step() -> list[Tensor]:
        # Without `deterministic`, dq is summed in any order.
        o = call(**leaves, **own, **scalars, deterministic=True)
        return [o.detach(), *torch.autograd.grad(o, trained, do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):  # makes tables, compiles kernels, and reaches calls that are replayed
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        leaves["q"].mul_(0.5)
        do.mul_(-1.5)
    graph.replay()
    torch.cuda.synchronize()
    got = [x.clone() for x in found]
    want = step()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y), f"{variant} by {strategy}"


@pytest.mark.parametrize("variant", ["causal", "forgetting", "gpt_oss"])
@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
def test_a_call_of_one_rank_is_captured(variant: str, strategy: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("nccl", init_method=method, rank=0, world_size=1, timeout=timedelta(minutes=3))
    try:
        captured_step(init_device_mesh("cuda", (1,), mesh_dim_names=("cp",)), variant, strategy)
    finally:
        dist.destroy_process_group()


def one_process(rank: int, ranks: int, folder: str) -> None:
    """All cases on one GPU of several."""
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))
    try:
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
        for strategy in ("gather", "heads", "exchange", "ring"):
            for variant in ("causal", "window", "forgetting"):
                captured_step(mesh, variant, strategy)
        if ranks >= 4:
            captured_step(init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("node", "gpu")), "causal", "2d")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, which NCCL connects")
def test_calls_over_gpus_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes import this module by its name, which pytest forms from the folders that are packages.
    monkeypatch.syspath_prepend(Path(__file__).parents[__name__.count(".")])
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # which torch does not name in __all__
    spawn(one_process, (ranks, str(tmp_path)), nprocs=ranks)
