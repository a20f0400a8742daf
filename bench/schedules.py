"""What it costs to list the blocks of masks with holes: time beside the forward's, memory at a million positions."""

from __future__ import annotations

from typing import Any

import torch
from triton.testing import do_bench

from bench import golden
from bench.cases import Case
from bench.golden import Shape
from bench.measure import draw
from bench.peers import make_schedule

SEQ, LONG = 16384, 2**20
SHARE_LIMIT = 0.05
MEMORY_LIMIT = 100 * 2**20


def run() -> bool:
    """Print the table; whether every variant keeps the limits."""
    listed = {name: golden.load_op(name) for name in golden.load_manifest() if golden.has_lists(name)}
    print(f"\nlists of blocks, all passes: time at S={SEQ} beside one forward (B4 H16 D64), memory at S={LONG}\n")
    print(f"{'variant':16} {'lists ms':>9} {'forward ms':>11} {'share':>6}   {'lists MiB':>9} {'peak MiB':>9}")
    right = True
    for name, op in listed.items():
        lists_ms, forward_ms = _times(name, op)
        kept, peak = _memory(name, op)
        right &= lists_ms <= SHARE_LIMIT * forward_ms and peak <= MEMORY_LIMIT
        share = f"{lists_ms / forward_ms:.1%}"
        print(
            f"{name:16} {lists_ms:9.3f} {forward_ms:11.3f} {share:>6}   {kept / 2**20:9.1f} {peak / 2**20:9.1f}",
            flush=True,
        )
    return right


def _times(name: str, op: Any) -> tuple[float, float]:
    inputs = draw(Case(variant=name, shape=Shape(batch=4, heads=16, kv_heads=16, seq=SEQ, dim=64)))
    schedule = make_schedule(op, inputs)
    lists_ms: float = do_bench(lambda: make_schedule(op, inputs), return_mode="median")
    forward_ms: float = do_bench(lambda: inputs.call(op, schedule=schedule), return_mode="median")
    return lists_ms, forward_ms


def _memory(name: str, op: Any) -> tuple[int, int]:
    inputs = draw(Case(variant=name, shape=Shape(batch=1, heads=1, kv_heads=1, seq=LONG, dim=64)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    schedule = make_schedule(op, inputs)
    torch.cuda.synchronize()
    return schedule.nbytes, torch.cuda.max_memory_allocated() - before
