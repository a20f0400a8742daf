"""Calls of float8_e4m3fn beside those of bfloat16: their times, and their errors on inputs with outliers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases.case import flops
from bench.cases.suites import fa3_shape
from bench.timing.measure import DTYPE
from codegen.testing import golden
from codegen.tune import timing
from generated.float8 import hadamard, quantize

VARIANTS, DIMS, SEQS = ("causal", "full"), (128, 256), (2048, 8192, 16384)

OUTLIER_SHARE, OUTLIER_DEVIATION, OUTLIER_SEQ = 0.001, 10.0, 4096
"""FlashAttention-3's inputs (arXiv:2407.08608, section 4.3): normal numbers, and outliers added to a share of them."""

ERROR_LIMIT = 2.4e-2
"""The error of o against float64 that the paper reports for one scale per tensor. Ours has one scale per head and must
stay below."""


def run(budget_ms: float = 300.0) -> bool:
    """Print both tables. True if the errors are within the limit."""
    print(f"\nfloat8_e4m3fn beside bfloat16, {torch.cuda.get_device_name()}, forward, TFLOP/s of unmasked scores")
    print("the transposition of v that a call of float8 makes is part of its time\n")
    for dim in DIMS:
        for variant in VARIANTS:
            for seq in SEQS:
                _times(variant, seq, dim, budget_ms)
    print("\nroot mean square errors of o beside float64, full, normal inputs with outliers\n")
    errors = [_errors(dim) for dim in DIMS]
    return max(errors) < ERROR_LIMIT


def _in_float8(op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(quantize, (q, k, v))
    return functools.partial(op, q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


def _times(variant: str, seq: int, dim: int, budget_ms: float) -> None:
    shape, op = fa3_shape(seq, dim), golden.load_op(variant)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, shape.batch, shape.heads, seq, dim, device="cuda", dtype=DTYPE)
    calls: dict[str, Callable[[], Any]] = {
        "bfloat16": functools.partial(op, q, k, v),
        "float8": _in_float8(op, q, k, v),
    }
    ms = {name: each.ms for name, each in timing.in_turn(calls, budget_ms)[0].items()}
    pairs = seq * (seq + 1) / 2 if variant == "causal" else seq * seq
    rates = {name: flops("fwd", dim, pairs * shape.batch * shape.heads) / each / 1e9 for name, each in ms.items()}
    text = "".join(f"{name} {rate:7.0f}  " for name, rate in rates.items())
    print(f"{variant:8} D{dim} S{seq:<6} {text} {ms['bfloat16'] / ms['float8']:.2f}x", flush=True)


def _errors(dim: int) -> float:
    """Print the errors at a head_dim; returns the largest."""
    op, heads = golden.load_op("full"), 8
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, OUTLIER_SEQ, dim, device="cuda", dtype=torch.float64)
    q, k, v = (x + OUTLIER_DEVIATION * torch.randn_like(x) * (torch.rand_like(x) < OUTLIER_SHARE) for x in (q, k, v))
    weights = torch.softmax(q @ k.mT / dim**0.5, -1)
    wanted = weights @ v
    turn = hadamard(dim, dtype=torch.float64, device="cuda")
    found = {
        "bfloat16": op(*(x.to(DTYPE) for x in (q, k, v))),
        "float8": _in_float8(op, q, k, v)(),
        "float8, q and k rotated": _in_float8(op, q @ turn, k @ turn, v)(),
    }
    errors = {name: float((o.double() - wanted).square().mean().sqrt()) for name, o in found.items()}
    print(f"D{dim} " + "  ".join(f"{name} {error:.2e}" for name, error in errors.items()), flush=True)
    return max(errors.values())
