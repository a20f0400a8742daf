"""Trains a small transformer with each sequence split over several processes; compares the losses with one process.

    python -m examples.train_parallel --ranks 2 --variant causal --strategy ring --compile

With at least as many GPUs as ranks, each process has one GPU and NCCL connects them. Otherwise the processes run on the
CPU, with gloo.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# PyTorch imports this sooner or later. After `init_process_group` the default arguments of its functions would keep the
# group: gloo's threads would outlive the interpreter, which they need to free tensors, and might abort the process.
import torch.distributed.nn
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from codegen.cli.options import at_least
from examples.train import Attend, Size, Transformer, load_text

SMALL = Size(layers=2, heads=4, kv_heads=2, head_dim=16, seq=250, batch=2, steps=12, learning_rate=3e-3)
LARGE = Size(layers=4, heads=16, kv_heads=4, head_dim=128, seq=32768, batch=1, steps=50, learning_rate=3e-4)

VARIANTS: dict[str, dict[str, Any]] = {"causal": {}, "window": {"size": 64}, "softcap": {}}
"""Variants that the model may use, and their arguments."""


def batches(size: Size) -> list[Tensor]:
    """The bytes of each step, `[batch, seq + 1]`, the same in every process."""
    text, _ = load_text()
    order = torch.Generator().manual_seed(1)
    starts = [torch.randint(len(text) - size.seq, (size.batch,), generator=order) for _ in range(size.steps)]
    return [text[each[:, None] + torch.arange(size.seq + 1)].long() for each in starts]


def train(size: Size, attend: Attend, device: str, layout: Any = None) -> list[float]:
    """The loss of each step. With a layout this process holds some rows of each sequence; losses are over all rows."""
    torch.manual_seed(0)
    model = Transformer(size, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    losses = []
    for window in batches(size):
        tokens, targets = window[:, :-1].to(device), window[:, 1:].to(device)
        position = model.position
        if layout is not None:
            # Padding is 0. Targets are shifted by one before and after, so that padding becomes -1, which is ignored.
            tokens, targets = layout.shard(tokens, 1), layout.shard(targets + 1, 1) - 1
            position = layout.shard(position)
        logits = model.logits(model.norm(model.blocks(model.embed(tokens) + position)))
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        loss = total / window[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        if layout is not None:
            loss = _summed(loss.detach(), model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _summed(loss: Tensor, model: nn.Module) -> Tensor:
    """Add up the loss and the gradients of all ranks. Each rank has computed those of its own rows."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce(loss)
    return loss


def one_process(rank: int, ranks: int, device: str, args: argparse.Namespace, folder: str) -> None:
    """Train as one of several ranks; the first one writes the losses to a file."""
    import generated.torch
    from generated.torch_parallel import context_parallel, plan

    size = LARGE if device == "cuda" else SMALL
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    method = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    try:
        sizes, names = ((2, ranks // 2), ("node", "gpu")) if args.strategy == "2d" else ((ranks,), ("cp",))
        mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
        op, own = getattr(generated.torch, args.variant), VARIANTS[args.variant]
        heads = (size.heads, size.kv_heads)
        layout = plan(op, mesh, seq=size.seq, heads=heads, head_dim=size.head_dim, strategy=args.strategy, **own)
        parallel = context_parallel(op, layout)
        if rank == 0:
            print(layout.report())

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found: Tensor = parallel(q, k, v, **own)
            return found

        if args.compile:
            attend = torch.compile(attend, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        losses = train(size, attend, device, layout)
        if rank == 0:
            torch.save(losses, Path(folder) / "losses")
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Train with several processes and with one; 1 if their losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=at_least(1), default=2, help="number of processes (default: 2)")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="causal", help="attention (default: causal)")
    strategies = ["auto", "heads", "gather", "exchange", "ring", "2d"]
    parser.add_argument(
        "--strategy",
        choices=strategies,
        default="auto",
        help="how processes share attention; 2d: as two nodes (default: auto)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the attention with torch.compile, as one graph")
    args = parser.parse_args(arguments)
    if args.strategy == "2d" and args.ranks % 2:
        parser.error("--strategy 2d needs an even number of ranks, those of two nodes")
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # which torch does not name in __all__
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_process, (args.ranks, device, args, folder), nprocs=args.ranks)
        several = torch.load(Path(folder) / "losses")

    import generated.torch

    op, own = getattr(generated.torch, args.variant), VARIANTS[args.variant]
    one = train(LARGE if device == "cuda" else SMALL, lambda q, k, v: op(q, k, v, **own), device)
    print(f"{'step':>4}  {'1 process':>10}  {f'{args.ranks} processes':>12}")
    for step, (alone, together) in enumerate(zip(one, several, strict=True), 1):
        print(f"{step:>4}  {alone:>10.5f}  {together:>12.5f}")
    difference = max(abs(a - b) for a, b in zip(one, several, strict=True))
    is_well = difference < (1e-2 if device == "cuda" else 1e-4)
    print(f"largest difference {difference:.1e}. {'All is well' if is_well else 'The losses differ'}.")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
