"""The cost of block tables: their time relative to the forward, and their memory at a million positions."""

from __future__ import annotations

from typing import Any

import torch
from triton.testing import do_bench

from bench.cases.case import Case
from bench.timing.measure import draw
from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Shape

SEQ, LONG = 16384, 2**20
SHARE_LIMIT = 0.05
MEMORY_LIMIT = 100 * 2**20


def run() -> bool:
    """Print the table. True if every variant stays within the limits."""
    ops = {name: golden.load_op(name) for name in golden.load_manifest()}
    scheduled = {name: op for name, op in ops.items() if golden.has_tables(name)}
    print(f"\ntables of blocks, all passes: time at S={SEQ} beside one forward (B4 H16 D64), memory at S={LONG}\n")
    print(f"{'variant':16} {'tables ms':>9} {'forward ms':>11} {'share':>6}   {'tables MiB':>10} {'peak MiB':>9}")
    right = True
    for name, op in scheduled.items():
        tables_ms, forward_ms = _times(name, op)
        kept, peak = _memory(name, op)
        right &= tables_ms <= SHARE_LIMIT * forward_ms and peak <= MEMORY_LIMIT
        share = f"{tables_ms / forward_ms:.1%}"
        print(
            f"{name:16} {tables_ms:9.3f} {forward_ms:11.3f} {share:>6}   {kept / 2**20:10.2f} {peak / 2**20:9.1f}",
            flush=True,
        )
    return right


def _times(name: str, op: Any) -> tuple[float, float]:
    inputs = draw(Case(variant=name, shape=Shape(batch=4, heads=16, kv_heads=16, seq=SEQ, dim=64)))
    schedule = make_schedule(op, inputs)
    tables_ms: float = do_bench(lambda: make_schedule(op, inputs), return_mode="median")
    forward_ms: float = do_bench(lambda: inputs.call(op, schedule=schedule), return_mode="median")
    return tables_ms, forward_ms


def _memory(name: str, op: Any) -> tuple[int, int]:
    inputs = draw(Case(variant=name, shape=Shape(batch=1, heads=1, kv_heads=1, seq=LONG, dim=64)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    schedule = make_schedule(op, inputs)
    torch.cuda.synchronize()
    return schedule.nbytes, torch.cuda.max_memory_allocated() - before
