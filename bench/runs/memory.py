"""Peak memory of forward and backward at two lengths, which must grow linearly: no S x S matrix."""

from __future__ import annotations

import torch

from bench.cases.case import Case
from bench.peers.torch_peers import build
from bench.record import OURS
from bench.timing.measure import draw
from codegen.testing.golden import Shape, load_manifest

LENGTHS = (32768, 65536)
MAX_GROWTH = 2.2
"""Largest growth when the length doubles: 2 is linear, 4 quadratic; 0.2 is for the allocator."""

MIB = 2**20


def _peak(variant: str, seq: int) -> int:
    """Peak bytes of one forward and backward, without the inputs and the output's gradient."""
    case = Case(variant=variant, shape=Shape(batch=1, heads=4, kv_heads=2, seq=seq, dim=64))
    inputs = draw(case)
    runner = build(OURS, case, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.gradients(runner.forward())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def run() -> bool:
    """Print the table. True if every variant's memory is linear in the length."""
    lengths = " ".join(f"{f'S={seq}':>10}" for seq in LENGTHS)
    print("\nPeak memory of forward + backward beyond the inputs, MiB (B1 H4/2 D64, bfloat16)", flush=True)
    print(f"  {'variant':14} {lengths}   growth")
    right = True
    for variant in load_manifest():
        short, long = (_peak(variant, seq) for seq in LENGTHS)
        linear = long <= MAX_GROWTH * short
        right = right and linear
        verdict = "OK" if linear else "NOT LINEAR"
        print(f"  {variant:14} {short / MIB:10.1f} {long / MIB:10.1f}   {long / short:6.2f} {verdict}", flush=True)
    return right
