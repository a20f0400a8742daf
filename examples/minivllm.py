"""MinivLLM's three attention functions computed by an op: `python -m examples.minivllm`.

MinivLLM (github.com/Wenyueh/MinivLLM) is a small engine for teaching. Its `layers/attention.py` calls three functions
of its own: prefill of packed prompts, decoding from paged caches, storing keys and values. `examples/engine_calls.py`
computes the same three by an op. The script compares them with the formula in float64, on prompts and in the shapes in
which MinivLLM measures decoding.

With `--source FOLDER`, a clone of MinivLLM, its own functions are compared too. On a GPU all are timed: decoding in a
CUDA graph, prefill as separate calls, because MinivLLM's prefill copies a length to the CPU, which no graph can record.

The exit status is 1 if a result of the op differs by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.engine_calls import MinivllmCalls, formula
from generated import paging
from generated.torch import causal

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
DECODING = ((2, 60), (1, 512), (16, 256), (4, 2048))
"""Sequences and their length, as MinivLLM's benchmark of decoding has them."""

PREFILL = (64, 128, 256, 512, 1024)
"""Lengths of a prompt: MinivLLM's benchmark looks for the length from which a tiled kernel is faster."""

CALLS = 20
"""Calls of a CUDA graph."""

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Largest error relative to the largest element."""


def decoding(
    calls: Any, batch: int, length: int, device: str, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], float]:
    """A call in one shape, on blocks in a random order, and its error."""
    torch.manual_seed(0)
    pool = paging.Pool(batch * -(-length // BLOCK), BLOCK)
    order = torch.randperm(batch * length) % batch
    slots: list[list[int]] = [[] for _ in range(batch)]
    for each in order.tolist():  # the sequences grow by turns, so their blocks are mixed
        slots[each] += pool.extend(each, 1)
    lengths = [len(each) for each in slots]
    q = torch.randn(batch, HEADS, DIM, device=device).to(dtype)
    k, v = torch.randn(2, batch * length, KV_HEADS, DIM, device=device).to(dtype)
    k_cache, v_cache = torch.zeros(2, batch * -(-length // BLOCK), BLOCK, KV_HEADS, DIM, device=device).to(dtype)
    where = torch.tensor([slot for each in slots for slot in each], dtype=torch.int32, device=device)
    calls.store_kvcache(k, v, k_cache, v_cache, where, BLOCK)
    table = torch.tensor(pool.page_table(range(batch)), dtype=torch.int32, device=device)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def call() -> Tensor:
        sizes = (HEADS, KV_HEADS, DIM, BLOCK)
        found: Tensor = calls.paged_attention_decode(q, k_cache, v_cache, table, context_lens, DIM**-0.5, *sizes)
        return found

    parts = zip(q[:, None], k.split(lengths), v.split(lengths), strict=True)
    return call, error(call(), torch.cat([formula(*each, DIM**-0.5) for each in parts]))


def prefill(calls: Any, *, lengths: list[int], device: str, dtype: torch.dtype) -> tuple[Callable[[], Tensor], float]:
    """A call on prompts end to end, and its error."""
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), HEADS, DIM, device=device).to(dtype)
    k, v = torch.randn(2, sum(lengths), KV_HEADS, DIM, device=device).to(dtype)
    begins = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def call() -> Tensor:
        found: Tensor = calls.flash_attention_prefill(q, k, v, begins, DIM**-0.5, HEADS, KV_HEADS, DIM)
        return found

    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return call, error(call(), torch.cat([formula(*each, DIM**-0.5) for each in parts]))


def error(got: Tensor, want: Tensor) -> float:
    found: float = ((got.double() - want).abs().max() / want.abs().max()).item()
    return found


def microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the GPU, launches included."""
    times = []
    for _ in range(60):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return float(sorted(times[10:])[25])


def replayed_microseconds(call: Callable[[], Any]) -> float:
    """The same for a call in a CUDA graph of CALLS calls, as engines decode: the time of Python is not in it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return microseconds(graph.replay) / CALLS


def main() -> int:
    """Compare, and time; returns 0 if the op's results are right."""
    parser = argparse.ArgumentParser(prog="python -m examples.minivllm", description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder of a clone of MinivLLM; also compare its own functions")
    source: Path | None = parser.parse_args().source
    if source is not None and not (source / "src" / "myvllm").is_dir():
        parser.error(f"--source: expected a folder with src/myvllm, got {source}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    dtype = torch.float16 if on_gpu else torch.float32
    contenders: dict[str, Any] = {"generated": MinivllmCalls(causal)}
    if source is None:
        print("MinivLLM's own functions are not compared: --source names a clone of github.com/Wenyueh/MinivLLM.")
    else:
        sys.path.insert(0, str(source / "src"))
        contenders["MinivLLM"] = importlib.import_module("myvllm.layers.attention")
    print(f"{dtype} on {device}, {HEADS}/{KV_HEADS} heads of {DIM}, blocks of {BLOCK}; error against float64")
    right = True
    cases: list[tuple[str, Any, Any]] = [("prefill 70, 1, 33", partial(prefill, lengths=[70, 1, 33]), microseconds)]
    cases += [(f"prefill {n}", partial(prefill, lengths=[n]), microseconds) for n in PREFILL if on_gpu or n <= 128]
    cases += [(f"decode B{b} S{s}", partial(decoding, batch=b, length=s), replayed_microseconds) for b, s in DECODING]
    for title, make, timed in cases:
        shown = []
        for name, each in contenders.items():
            call, found = make(each, device=device, dtype=dtype)
            right = right and (name != "generated" or found <= BOUND[dtype])
            time = f" {timed(call):8.1f} us" if on_gpu else ""
            shown.append(f"{name} {found:.1e}{time}")
        print(f"  {title:18} {'   '.join(shown)}", flush=True)
    print("All is well." if right else f"FAILED: an error is above {BOUND[dtype]:.0e}.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
