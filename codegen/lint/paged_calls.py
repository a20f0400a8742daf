"""Calls an op on paged caches with arguments of the right shapes, and appends to the caches; values do not matter."""

from __future__ import annotations

import importlib
from dataclasses import asdict, replace

import torch

from codegen.arch.paged import PagedPass
from codegen.lint.calls import BATCH, HEADS, KV_HEADS, LENGTH
from codegen.lint.paged_jobs import PagedJob
from codegen.spec.model import Variant
from codegen.testing.paged_calls import PagedShape, draw_paged_call, new_tokens

CAPACITY = 4096
"""Keys that the table has room for: enough for several splits of every default tile."""


def run_paged_call(variant: Variant, job: PagedJob, package: str) -> None:
    """Append a token to the caches and call the op of `package` as `job` says."""
    queries = 1 if job.pass_ is PagedPass.DECODE else LENGTH
    shape = PagedShape(
        lengths=[CAPACITY] * BATCH,
        queries=queries if job.queries is None else job.queries,
        group=HEADS // KV_HEADS,
        kv_heads=KV_HEADS,
        head_dim=job.head_dim,
        page_size=job.page_size,
        dim_v=job.value_dim,
        values_in_keys=job.value_dim is not None,
    )
    call = draw_paged_call(variant, shape, job.dtype, "cpu")
    paging = importlib.import_module(f"{package}.paging")
    paging.append(*new_tokens(shape, job.dtype), call.k, call.v, torch.zeros(BATCH, dtype=torch.int32))
    op = getattr(importlib.import_module(f"{package}.torch"), variant.name)
    if job.small:
        k = call.k.to(torch.float8_e4m3fn)
        scales = torch.ones(k.shape[:3])
        replace(call, k=k, v=k[..., : job.value_dim]).call(op, k_scale=scales, v_scale=scales)
    elif job.value_dim is not None:
        # A call that asks for a tile runs the portable kernel.
        call.call(op)
    else:
        call.call(op, config={str(job.pass_): asdict(job.tile)}, family=job.family or None)
