"""Checks and times tiles of the kernels on paged caches on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.compile.packages import Package
from codegen.spec.model import Variant
from codegen.testing.calls import BOUND, load_op, relative_errors
from codegen.testing.paged_calls import PagedCall, PagedShape, draw_paged_call, own_arguments, random_table, seen_whole
from codegen.tune.compiling import first_line
from codegen.tune.paged_space import KV_HEADS, PagedWorkload
from codegen.tune.record import PagedGroup

DEVICE = "cuda"

CHECKED_LENGTHS = (700, 1, 0, 1300)
"""Keys of the sequences of a call that is checked: cut blocks, one key, none, and enough for several splits."""

CHECKED_PROMPTS = (700, 100, 300, 1300)
"""Keys of the sequences of a call with prompts that is checked: the last 100 tokens of each sequence are new."""

CHECKED_PAGES = (256, 16)
"""Page sizes of the calls that are checked: pages that hold whole blocks of keys, and pages that do not."""

COLD_BYTES = 2**28
"""Bytes of caches that a timed series of calls reads before it reads them again: more than any L2 cache holds."""

MOST_CALLS, ROUNDS = 32, 5
"""Most calls of a series, and how often the series is timed."""

MOST_BYTES = 12 * 2**30
"""Most bytes of the caches of a timed call, but never more than a third of the GPU's memory."""


class PagedBench:
    """Checks and times tiles of one group's kernel."""

    def __init__(self, package: Package, variant: Variant, group: PagedGroup) -> None:
        self.variant = variant
        self.group = group
        self.op: Any = load_op(variant.name, package.name)
        self._goldens: dict[int, tuple[PagedCall, dict[str, Tensor]]] = {}

    def check(self, tile: PagedTileConfig) -> str:
        """Compare o and lse with the plain reference; "" when they are right, else what is wrong."""
        try:
            for page_size in CHECKED_PAGES:
                call, wanted = self._golden(page_size)
                o, lse = call.call(self.op, return_lse=True, config=self._config(tile))
                got = {"o": o.cpu(), "lse": lse.cpu()}
                # A row without any key has an lse of -inf in both.
                got["lse"], want_lse = _finite(got["lse"]), _finite(wanted["lse"])
                errors = relative_errors(got, {"o": wanted["o"], "lse": want_lse})
                worst, bound = max(errors, key=lambda name: errors[name]), BOUND[o.dtype]
                if not errors[worst] <= bound:
                    return f"wrong: {worst} is off by {errors[worst]:.1e}, bound {bound:.0e}, on pages of {page_size}"
        except Exception as error:  # out of resources, a compiler's failure: all are reasons not to take it
            return f"{type(error).__name__}: {first_line(error)}"
        return ""

    def fits(self, workload: PagedWorkload) -> bool:
        """Whether the GPU has memory for a workload."""
        limit = min(MOST_BYTES, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 3)
        return self._bytes(workload) <= limit

    def time(self, tile: PagedTileConfig, workload: PagedWorkload) -> float:
        """Milliseconds of one layer's call, the plan of the step not counted.

        Calls on different pages of a pool follow each other in one CUDA graph, so that no cache holds what a call reads
        and no launch is waited for.
        """
        shape = workload.shape(self.group.group, self.group.head_dim)
        count = max(1, min(MOST_CALLS, COLD_BYTES // max(self._bytes(workload), 1)))
        k, v = self._pool(shape, count)
        own = self._own(shape, k.shape[0])
        q = torch.randn(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=k.dtype, device=DEVICE)
        lengths = torch.full((shape.batch,), workload.keys, dtype=torch.int32, device=DEVICE)
        config = self._config(tile)
        calls = [
            PagedCall(q=q, k=k, v=v, own=own, table=self._table(shape, k.shape[0], number), lengths=lengths)
            for number in range(count)
        ]
        pages = {"page_table": calls[0].table, "kv_lengths": lengths}
        plan = self.op.plan(q, k, config=config, **own, **pages)

        def series() -> None:
            for call in calls:
                call.call(self.op, schedule=plan, config=config)

        return graph_time(series) / count

    def _golden(self, page_size: int) -> tuple[PagedCall, dict[str, Tensor]]:
        """A small call on the GPU, and its results by the plain reference, in float32 on the CPU."""
        if page_size not in self._goldens:
            decodes = self.group.pass_ is PagedPass.DECODE
            shape = PagedShape(
                lengths=CHECKED_LENGTHS if decodes else CHECKED_PROMPTS,
                queries=1 if decodes else min(CHECKED_PROMPTS),
                group=self.group.group,
                kv_heads=2,
                head_dim=self.group.head_dim,
                page_size=page_size,
            )
            call = draw_paged_call(self.variant, shape, self.group.dtype, DEVICE)
            o, lse = call.plain().call(self.op, return_lse=True)
            self._goldens[page_size] = call, {"o": o, "lse": lse}
        return self._goldens[page_size]

    def _bytes(self, workload: PagedWorkload) -> int:
        """Bytes of the caches that a call reads."""
        columns: int = 2 * self.group.head_dim * KV_HEADS * getattr(torch, self.group.dtype).itemsize
        return workload.batch * workload.keys * columns

    def _pool(self, shape: PagedShape, count: int) -> tuple[Tensor, Tensor]:
        pages = shape.pages * count
        return pool(pages * shape.page_size, self.group.dtype, shape.kv_heads, shape.head_dim, shape.page_size)

    def _table(self, shape: PagedShape, pages: int, number: int) -> Tensor:
        table = random_table(shape, shape.pages, DEVICE, number)
        return (table + number * shape.pages) % pages

    def _own(self, shape: PagedShape, pages: int) -> dict[str, Any]:
        most = max(shape.lengths)
        return own_arguments(
            self.variant, shape, pages, lambda spec, sizes: seen_whole(spec, sizes, most=most, device=DEVICE), DEVICE
        )

    def _config(self, tile: PagedTileConfig) -> dict[str, dict[str, int]]:
        return {str(self.group.pass_): asdict(tile)}


@lru_cache(maxsize=1)
def pool(keys: int, dtype: str, kv_heads: int, head_dim: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Caches of keys and of values, for `keys` keys each."""
    shape = (keys // page_size, page_size, kv_heads, head_dim)
    k = torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE).normal_()
    return k, torch.empty_like(k).normal_()


def graph_time(series: Callable[[], None]) -> float:
    """The median time of a series of launches, replayed from a CUDA graph, in milliseconds."""
    for _ in range(3):
        series()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        series()
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -float("inf"), torch.zeros_like(lse), lse)
