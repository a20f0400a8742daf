"""Exchanges by copies from peers' memory: they bring what the process group's collectives bring. Needs two GPUs:

python -m pytest tests/kernels/test_parallel_peers.py -q
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from codegen.testing import calls
from generated._runtime.torch.collectives import GroupCollectives
from generated._runtime.torch.peers import PeerCollectives
from generated.torch_parallel import context_parallel, plan

HEADS, DIM, SEQ = (8, 4), 64, 2048
LENGTHS = (1, 3, 1000, 4096, 300_000, 3_000_000)
"""Rows of a message: some buffers have room for many, some must grow for one."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def messages_are_those_of_the_group(rank: int, ranks: int, mesh: Any) -> None:
    """Many messages of every kind, several on their way at once, on a GPU that lags behind or does not."""
    group, chance = mesh.get_group(), random.Random(0)
    peers, plain = PeerCollectives(group, "cuda", must=True), GroupCollectives(group, "cuda")
    coming: list[tuple[str, Tensor, Tensor]] = []
    for number in range(120):
        kind, rows = chance.choice(["all_to_all", "all_gather", "reduce_scatter", "exchange"]), chance.choice(LENGTHS)
        dtype = chance.choice([torch.bfloat16, torch.float32])
        generator = torch.Generator("cuda").manual_seed(1000 * number + rank)
        counts = [[0 if a == b else chance.randint(0, rows) for b in range(ranks)] for a in range(ranks)]
        length = sum(counts[rank]) if kind == "exchange" else rows * ranks
        x = torch.randn(length, 3, generator=generator, device="cuda").to(dtype)
        more = ([each[rank] for each in counts], counts[rank], max(map(max, counts))) if kind == "exchange" else ()
        if chance.random() < 0.3:
            torch.cuda._sleep(300_000)
        got, want = (getattr(each, kind)(x, *more) for each in (peers, plain))
        coming.append((kind, got, plain.wait(want)))
        del x
        while coming and chance.random() < 0.5:
            kind, got, want = coming.pop(0)
            assert torch.equal(peers.wait(got), want), kind
    for kind, got, want in coming:
        assert torch.equal(peers.wait(got), want), kind


def calls_have_the_same_bits(mesh: Any, variant: str, strategy: str, documents: list[int] | None) -> None:
    """o, lse and all gradients by both transports."""
    shape = calls.Shape(batch=1, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=DIM)
    entry = calls.load_manifest()[variant]
    inputs = calls.draw_inputs(entry, shape, dtype=torch.bfloat16, device="cuda")
    inputs = calls.packed(entry, inputs) if documents else inputs
    op, scalars, axis = calls.load_op(variant), dict[str, Any](inputs.scalars), 0 if documents else 2
    layout = plan(
        op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, cu_seqlens=documents, head_groups=2, **scalars
    )
    leaves = {name: layout.shard(getattr(inputs, name).detach(), axis).requires_grad_() for name in ("q", "k", "v")}
    own = {name: x.detach() for name, x in inputs.tensors.items()}
    do = layout.shard(inputs.do, axis)
    found = []
    for transport in ("peers", "group"):
        call = context_parallel(op, layout, transport=transport)
        for _ in range(4):
            o, lse = call(**leaves, **own, **scalars, return_lse=True, deterministic=True)
            gradients = torch.autograd.grad(o, list(leaves.values()), do)
        found.append([o, lse, *gradients])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y), f"{variant} by {strategy}"


def one_process(rank: int, ranks: int, folder: str) -> None:
    """All cases on one GPU of several."""
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))
    try:
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
        messages_are_those_of_the_group(rank, ranks, mesh)
        for strategy in ("heads", "gather", "exchange", "ring"):
            calls_have_the_same_bits(mesh, "causal", strategy, None)
            calls_have_the_same_bits(mesh, "causal", strategy, [0, 300, 700, 1900, SEQ])
        calls_have_the_same_bits(mesh, "gpt_oss", "heads", None)
    finally:
        dist.destroy_process_group()


def test_peers_bring_what_the_group_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes find this module by its name, which pytest makes of the folders that are packages.
    monkeypatch.syspath_prepend(Path(__file__).parents[__name__.count(".")])
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    spawn: Callable[..., Any] = multiprocessing.spawn  # type: ignore[attr-defined]  # which torch does not name in __all__
    spawn(one_process, (ranks, str(tmp_path)), nprocs=ranks)
