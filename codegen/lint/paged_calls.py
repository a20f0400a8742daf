"""Calls an op on paged caches with arguments of the right shapes, and appends to the caches; values do not matter."""

from __future__ import annotations

import importlib
from dataclasses import asdict

import torch

from codegen.arch.paged import PagedPass
from codegen.lint.calls import BATCH, HEADS, KV_HEADS, LENGTH
from codegen.lint.jobs import FP8
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
    call = draw_paged_call(variant, shape, job.dtype, "cpu", cache_dtype=FP8 if job.small else "")
    # Keys and values have one scale: in latent attention values are inside keys.
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(call.k.shape[:3])) if job.small else {}
    paging = importlib.import_module(f"{package}.paging")
    paging.append(*new_tokens(shape, job.dtype), call.k, call.v, torch.zeros(BATCH, dtype=torch.int32), **scales)
    op = getattr(importlib.import_module(f"{package}.torch"), variant.name)
    if job.value_dim is not None:
        # A call that asks for a tile runs the portable kernel.
        call.call(op, **scales)
    else:
        call.call(op, config={str(job.pass_): asdict(job.tile)}, family=job.family or None)
