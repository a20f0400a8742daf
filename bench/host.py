"""What one call costs the CPU: Python, checks and launches, with no wait for the GPU."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.cases import Case
from bench.golden import Inputs, Shape
from bench.measure import draw
from bench.peers import OURS, TITLES, build

CASE = Case(variant="causal", shape=Shape(batch=1, heads=8, kv_heads=8, seq=128, dim=64))
TARGET_US = 60.0
"""Microseconds one forward of ours may take without autograd."""

# Fewer launches than the driver's queue of 1024 holds: enqueueing never waits for the GPU.
CALLS, REPEATS = 150, 15


def _implementations(inputs: Inputs) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    yield TITLES[OURS], build(OURS, CASE, inputs).forward
    yield "SDPA", lambda: scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    yield TITLES["flex"], build("flex", CASE, inputs).forward


def microseconds(call: Callable[[], Any]) -> float:
    """Median time of one call among many enqueued at once."""
    for _ in range(10):
        call()
    times = timeit.repeat(call, setup=torch.cuda.synchronize, repeat=REPEATS, number=CALLS)
    torch.cuda.synchronize()
    return statistics.median(times) / CALLS * 1e6


def run() -> bool:
    """Print the table; whether ours is within its target."""
    print(f"\nCPU time of one call, microseconds ({CASE.name}, bfloat16; no waiting for the GPU)", flush=True)
    print(f"  {'':14} {'forward':>9} {'with autograd':>14} {'and backward':>13}")
    inputs = draw(CASE)
    ours_us = 0.0
    for name, forward in _implementations(inputs):
        with torch.no_grad():
            plain = microseconds(forward)

        def both(forward: Callable[[], Tensor] = forward) -> None:
            torch.autograd.grad(forward(), (inputs.q, inputs.k, inputs.v), inputs.do)

        print(f"  {name:14} {plain:9.1f} {microseconds(forward):14.1f} {microseconds(both):13.1f}", flush=True)
        ours_us = ours_us or plain
    right = ours_us <= TARGET_US
    print(f"  ours, forward: {ours_us:.1f}, target {TARGET_US:.0f}: {'OK' if right else 'TOO SLOW'}")
    return right
