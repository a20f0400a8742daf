"""Masks that keep no pair, in every mode of calls: o = 0, lse = -inf and gradients of 0, with a schedule and without.

A spec with such a mask is refused if the analysis finds that it is empty. This check is switched off here, because a
mask may also be empty in one mode only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import DEVICE, tiles
from tests.support.rendering import importable

SPEC = """
variants:
  residues: {mask: kv_idx % 4 == 5}
  gap: {mask: 33 < kv_idx and kv_idx < 3}
  unequal: {mask: q_idx != q_idx, score: "score + w[q_idx]", tensors: {w: {dims: [q_idx], grad: true}}, decay: true}
  none: {mask: n <= q_idx - kv_idx < n, scalars: {n: int}}
"""
OWN = {"none": {"n": 5}}
LENGTH = 20


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package."""
    folder = tmp_path_factory.mktemp("empty") / "tests"
    with (
        mock.patch("codegen.load.variants.keeps_nothing", return_value=False),
        importable(folder, "empty_masks", SPEC) as package,
    ):
        yield package.name


def _call(name: str, mode: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the other arguments of a call."""
    packed = mode == "packed"
    shape = (LENGTH, 2, 16) if packed else (1, 2, LENGTH, 16)
    own: dict[str, Any] = dict(OWN.get(name, {}))
    if name == "unequal":
        own["w"] = torch.randn(LENGTH, device=DEVICE, requires_grad=True)
        own["g"] = -torch.rand(*(() if packed else (1,)), LENGTH, 2, device=DEVICE)
    tokens = torch.tensor([0, 9, LENGTH], dtype=torch.int32, device=DEVICE)
    if packed:
        own |= {"cu_seqlens_q": tokens, "cu_seqlens_k": tokens}
    if mode == "segmented":
        ids = torch.arange(LENGTH, dtype=torch.int32, device=DEVICE)[None] // 9
        own |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(3)], own


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("residues", "dense"),
        ("residues", "packed"),
        ("residues", "segmented"),
        ("gap", "packed"),
        ("gap", "segmented"),
        ("unequal", "segmented"),
        ("none", "segmented"),
    ],
)
def test_a_mask_that_keeps_nothing_gives_zeros(package: str, name: str, mode: str) -> None:
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    inputs, own = _call(name, mode)
    config = tiles(32, 32)
    schedule = op.schedule(*inputs, **{k: v for k, v in own.items() if k not in ("w", "g")}, config=config)
    for options in ({}, {"schedule": schedule}):
        o, lse = op(*inputs, **own, return_lse=True, config=config, **options)
        gradients = torch.autograd.grad(o.sum(), inputs)
        assert (lse == -torch.inf).all()
        assert not any(x.any() for x in (o, *gradients))
