"""Calls on pages with caches of 8-bit floats and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.test_paged import Case

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = ("number", "head", "token")


def draw_scale(kind: str, x: Tensor) -> float | Tensor:
    """A scale for a cache `x`, with random values that differ by several octaves."""
    shape = {"number": (), "head": (x.shape[2],), "token": tuple(x.shape[:3])}[kind]
    scale = torch.rand(shape, device=x.device) * 0.03 + 0.002
    return float(scale) if kind == "number" else scale


def quantised(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A cache of 8-bit floats, and the values that it holds, in float64."""
    factor = scale[..., None] if isinstance(scale, Tensor) else scale
    most = torch.finfo(dtype).max
    small = (x.float() / factor).clamp(-most, most).to(dtype)
    return small, small.double() * (factor.double() if isinstance(factor, Tensor) else factor)


def quantised_case(case: Case, dtype: torch.dtype, k_scale: float | Tensor, v_scale: float | Tensor) -> Case:
    """A case on caches of 8-bit floats. Its sequences alone have the values that these caches hold."""
    (k, k_held), (v, v_held) = quantised(case.k, k_scale, dtype), quantised(case.v, v_scale, dtype)
    table, size = case.kwargs["page_table"], case.k.shape[1]
    alone = []
    for b, (q, keys, _, own) in enumerate(case.alone):
        place = torch.arange(len(keys), device=keys.device)
        page = table[b, place // size].long()
        alone.append((q, k_held[page, place % size], v_held[page, place % size], own))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return replace(case, k=k, v=v, kwargs=case.kwargs | scales, alone=alone)


def own_scales(case: Case, kinds: Sequence[str]) -> list[float | Tensor]:
    """Scales of both caches, with NaN for all tokens that no query may read."""
    found = []
    for kind, x in zip(kinds, (case.k, case.v), strict=True):
        scale = draw_scale(kind, x)
        found.append(scale.masked_fill(x.isnan().any(-1), float("nan")) if kind == "token" else scale)  # type: ignore[union-attr]
    return found
