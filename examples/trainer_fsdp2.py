"""Trains a tiny transformers model, sharded by FSDP2 over processes; compares the losses with one process.

    python -m examples.trainer_fsdp2 --ranks 2 --architecture Gemma2

With at least as many GPUs as ranks, each process has one GPU and NCCL connects them. Otherwise the processes run on the
CPU, with gloo. Each rank has its own rows of packed documents. The attention is named once, and the lines that call
FSDP2 do not depend on it.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# PyTorch imports this sooner or later. After `init_process_group` the default arguments of its functions would keep the
# group: gloo's threads would outlive the interpreter, which they need to free tensors, and might abort the process.
import torch.distributed.nn
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from codegen.cli.options import at_least
from examples.train import BYTES, load_text

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
}
"""Models that may be trained, and the fields of their configs in addition to the common size."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, the tokens of a row, the documents in it, and the steps of training."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    row: int
    documents: int
    steps: int
    learning_rate: float


SMALL = Size(layers=2, heads=4, kv_heads=2, head_dim=16, row=96, documents=4, steps=10, learning_rate=5e-3)
LARGE = Size(layers=8, heads=16, kv_heads=8, head_dim=128, row=8192, documents=12, steps=20, learning_rate=3e-4)


def make_model(architecture: str, size: Size, device: str) -> Any:
    """A model of random weights, the same in every process."""
    import transformers

    from generated.integrations import transformers as hf

    hf.register()
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=BYTES,
        hidden_size=size.heads * size.head_dim,
        intermediate_size=2 * size.heads * size.head_dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.row,
        pad_token_id=0,
        **ARCHITECTURES[architecture],
    )
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    return model_class._from_config(config, attn_implementation="codegen").to(device)


def batches(size: Size, rows: int) -> list[dict[str, Tensor]]:
    """The rows of each step: bytes `[rows, row]`, and positions that restart at 0 with each document."""
    text, _ = load_text()
    order = torch.Generator().manual_seed(1)
    found = []
    for _ in range(size.steps):
        starts = torch.randint(len(text) - size.row, (rows,), generator=order)
        ids = text[starts[:, None] + torch.arange(size.row)].long()
        cuts = [torch.randperm(size.row - 1, generator=order)[: size.documents - 1] + 1 for _ in range(rows)]
        begins = torch.zeros(rows, size.row, dtype=torch.int64)
        for row, each in enumerate(cuts):
            begins[row, each] = each
        found.append({"input_ids": ids, "position_ids": torch.arange(size.row) - begins.cummax(1).values})
    return found


def train(model: Any, size: Size, device: str, rank: int, ranks: int, rows: int) -> list[float]:
    """The loss of each step over the rows of all ranks. This rank computes `rows` rows, beginning at `rank * rows`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    losses = []
    for batch in batches(size, rows * ranks):
        own = {name: x[rank * rows : (rank + 1) * rows].to(device) for name, x in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(**own, labels=own["input_ids"], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().float()
        if dist.is_initialized():
            # All ranks have the same number of tokens, so the mean of their means is the mean over all tokens.
            dist.all_reduce(mean)
            mean /= ranks
        losses.append(mean.item())
    return losses


def shard(model: Any, device: str, ranks: int) -> None:
    """FSDP2 as its users write it: each layer, then the rest of the model."""
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shards",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_process(rank: int, ranks: int, device: str, architecture: str, folder: str) -> None:
    """Train as one of several ranks; the first one writes the losses to a file."""
    size = LARGE if device == "cuda" else SMALL
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    method = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    try:
        model = make_model(architecture, size, device)
        whole = sum(x.numel() for x in model.parameters())
        shard(model, device, ranks)
        own = sum(x.to_local().numel() for x in model.parameters())
        losses = train(model, size, device, rank, ranks, rows=1)
        if rank == 0:
            print(f"{ranks} ranks, each with {own} of {whole} weights")
            torch.save(losses, Path(folder) / "losses")
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Train with several processes and with one; 1 if their losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=at_least(1), default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "--architecture", choices=sorted(ARCHITECTURES), default="Gemma2", help="model (default: Gemma2)"
    )
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # which torch does not name in __all__
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_process, (args.ranks, device, args.architecture, folder), nprocs=args.ranks)
        several = torch.load(Path(folder) / "losses")
    size = LARGE if device == "cuda" else SMALL
    one = train(make_model(args.architecture, size, device), size, device, rank=0, ranks=1, rows=args.ranks)
    print(f"{'step':>4}  {'1 process':>10}  {f'{args.ranks} processes':>12}")
    for step, (alone, together) in enumerate(zip(one, several, strict=True), 1):
        print(f"{step:>4}  {alone:>10.5f}  {together:>12.5f}")
    difference = max(abs(a - b) for a, b in zip(one, several, strict=True))
    is_well = difference < (2e-2 if device == "cuda" else 1e-4) and several[-1] < several[0]
    verdict = "All is well" if is_well else "The losses differ, or do not fall"
    print(f"largest difference {difference:.1e}. {verdict}.")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
