"""CPU time of one call (Python, checks and launches, without waiting for the GPU), and of the replay of its graph."""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.record import OURS
from codegen.testing.golden import load_op

TOKENS, HEADS, DIM = 128, 8, 64
SEQUENCES = (0, 40, 128)
FORWARD_US, AUTOGRAD_US = 25.0, 60.0
"""Targets for our forward when it launches one kernel, microseconds without autograd and with it."""

# Fewer launches than the driver's queue holds (1024), so that enqueueing never waits for the GPU.
CALLS, REPEATS = 60, 25


@dataclass(frozen=True, kw_only=True)
class HostMeasurement:
    """CPU microseconds of one call. `replay_us`: replay of a CUDA graph of forward and backward.

    `note` is an error, or the reason why there is no `replay_us`.
    """

    case: str
    implementation: str
    forward_us: float
    autograd_us: float
    backward_us: float
    replay_us: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A forward call, its leaves, and the gradient of its output."""

    case: str
    name: str
    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    do: Tensor

    def step(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        o = self.forward()
        return (o, *torch.autograd.grad(o, self.leaves, self.do))


def _draw(*shape: int) -> tuple[list[Tensor], Tensor]:
    q, k, v, do = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    return [x.clone().requires_grad_() for x in (q, k, v)], do


def _implementations() -> Iterator[Implementation]:
    """Ours and peers on three cases: causal, documents given by ids, and the same documents packed."""
    causal, document = load_op("causal"), load_op("document")
    ends = torch.tensor(SEQUENCES, dtype=torch.int32, device="cuda")
    rows = torch.arange(TOKENS, device="cuda")
    doc = torch.searchsorted(ends[1:], rows, right=True, out_int32=True)
    dense, do = _draw(1, HEADS, TOKENS, DIM)
    packed, packed_do = _draw(TOKENS, HEADS, DIM)
    q, k, v = dense

    def within(_b: Any, _h: Any, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx])

    def below(_b: Any, _h: Any, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    mask = within(0, 0, rows[:, None], rows)
    blocks = {keep: create_block_mask(keep, None, None, TOKENS, TOKENS, device="cuda") for keep in (below, within)}
    run: Any = torch.compile(flex_attention, dynamic=False)
    called: dict[str, dict[str, Callable[[], Tensor]]] = {
        "causal": {
            OURS: lambda: causal(q, k, v),
            "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
            "Flex": lambda: run(q, k, v, block_mask=blocks[below]),
        },
        "document": {
            OURS: lambda: document(q, k, v, doc=doc[None]),
            "SDPA": lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask),
            "Flex": lambda: run(q, k, v, block_mask=blocks[within]),
        },
    }
    for case, forwards in called.items():
        for name, forward in forwards.items():
            yield Implementation(case=case, name=name, forward=forward, leaves=dense, do=do)
    yield Implementation(
        case="causal, packed",
        name=OURS,
        forward=lambda: causal(*packed, cu_seqlens_q=ends),
        leaves=packed,
        do=packed_do,
    )


def microseconds(call: Callable[[], Any]) -> float:
    """Median CPU time of one call, in microseconds, when many are enqueued at once."""
    for _ in range(10):
        call()
    times = timeit.repeat(call, setup=torch.cuda.synchronize, repeat=REPEATS, number=CALLS)
    torch.cuda.synchronize()
    return statistics.median(times) / CALLS * 1e6


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Capture a step in a CUDA graph; returns its replay and the tensors that the replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filled = step()
    return graph.replay, filled


def _measure(one: Implementation) -> HostMeasurement:
    with torch.no_grad():
        forward_us = microseconds(one.forward)
    autograd_us, backward_us = microseconds(one.forward), microseconds(one.step)
    replay_us, note = None, ""
    try:
        replay, filled = captured(one.step)
        replay_us = microseconds(replay)
        # A peer may accumulate its gradients in any order.
        if one.name == OURS and not all(map(torch.equal, filled, one.step())):
            note = "WRONG: the graph's results are not those of a call"
    except RuntimeError as error:  # it cannot be captured
        note = str(error).partition("\n")[0][:120]
    return HostMeasurement(
        case=one.case,
        implementation=one.name,
        forward_us=forward_us,
        autograd_us=autograd_us,
        backward_us=backward_us,
        replay_us=replay_us,
        note=note,
    )


def run() -> tuple[bool, list[HostMeasurement]]:
    """Print the table. Returns true if ours meets its targets and is right in a graph, and the measurements."""
    print(
        f"\nCPU time of one call, microseconds ({HEADS} heads, {TOKENS} tokens, head_dim {DIM}, bfloat16)", flush=True
    )
    print("  The documents of SDPA and Flex are those of `causal, packed`; graph replay: forward and backward.")
    print(f"  {'':15} {'':5} {'forward':>9} {'with autograd':>14} {'and backward':>13} {'graph replay':>13}")
    right, rows = True, []
    for one in _implementations():
        row = _measure(one)
        rows.append(row)
        replay = f"{'':13}" if row.replay_us is None else f"{row.replay_us:13.1f}"
        figures = f"{row.forward_us:9.1f} {row.autograd_us:14.1f} {row.backward_us:13.1f}"
        print(f"  {row.case:15} {row.implementation:5} {figures} {replay}  {row.note}", flush=True)
        right = right and not (one.name == OURS and row.note)
    plain, peer = rows[0], rows[1]
    is_light = layers_of_transformers("cuda")
    fast = plain.forward_us <= FORWARD_US and plain.autograd_us <= AUTOGRAD_US
    print(f"  ours, causal: targets {FORWARD_US:.0f} and {AUTOGRAD_US:.0f}: {'OK' if fast else 'TOO SLOW'}")
    is_level = plain.backward_us <= peer.backward_us
    print(f"  ours, causal, forward and backward: at most {peer.implementation}'s: {'OK' if is_level else 'TOO SLOW'}")
    return right and fast and is_level and is_light, rows


def layers_of_transformers(device: str) -> bool:
    """Print the CPU time of a layer of transformers beside the op's own call. True if it meets its target."""
    if find_spec("transformers") is None:
        print("  transformers is not installed: the calls of its layers are left out")
        return True
    from bench.runs.models import Effort, host_rows, print_host

    return print_host(host_rows(device, Effort()), device)


if __name__ == "__main__":
    # On a CPU only the layers of transformers are timed, because an op computes its reference there.
    sys.exit(not (run()[0] if torch.cuda.is_available() else layers_of_transformers("cpu")))
