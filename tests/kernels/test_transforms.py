"""Kernels under the transforms of torch.func, and derivatives that they do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.testing.golden import load_op
from tests.support import transforms
from tests.support.cases import DEVICE


@pytest.mark.parametrize("variant", ["alibi", "forgetting", "gpt_oss"])
def test_transforms_give_the_gradients_of_backward(variant: str) -> None:
    transforms.check_gradients_of_transforms(variant, DEVICE)


@pytest.mark.parametrize(
    ("variant", "mapped", "packed"),
    [
        ("causal", {"q"}, False),
        ("alibi", {"k", "slope"}, False),
        ("document", {"v", "doc"}, False),
        ("forgetting", {"q", "g"}, True),
        ("causal", {"v", "cu_seqlens_q"}, True),
        ("gpt_oss", {"q"}, True),
        ("alibi", {"k"}, True),
        ("relative_bias", {"v"}, True),
        ("forgetting", {"k"}, True),
    ],
)
def test_vmap_is_one_call_after_the_other(variant: str, mapped: set[str], packed: bool) -> None:
    transforms.check_mapped(variant, DEVICE, mapped, packed)


@pytest.mark.parametrize(
    ("variant", "mapped", "packed"),
    [
        ("gpt_oss", {"q", "sink"}, True),
        ("alibi", {"q", "slope"}, False),
        ("forgetting", {"g"}, True),
        ("causal", {"q", "cu_seqlens_q"}, True),
    ],
)
def test_vmap_over_the_last_axis(variant: str, mapped: set[str], packed: bool) -> None:
    transforms.check_mapped(variant, DEVICE, mapped, packed, axis=-1)


@pytest.mark.parametrize("mapped", [{"slope", "kv_lengths"}, {"kv_lengths"}])
def test_vmap_over_the_last_axis_of_lengths(mapped: set[str]) -> None:
    """Lengths also become the offsets of batch rows."""
    lengths = torch.tensor([[3, 8], [9, 1]], dtype=torch.int32, device=DEVICE)
    transforms.check_mapped("alibi", DEVICE, mapped, axis=-1, kv_lengths=lengths, q_offset="end")


@pytest.mark.parametrize("mapped", [{"q", "q_positions"}, {"slope", "q_positions"}])
def test_vmap_over_the_last_axis_of_positions(mapped: set[str]) -> None:
    positions = torch.stack([torch.arange(transforms.TOKENS), torch.arange(transforms.TOKENS) // 2]).to(DEVICE)
    both = positions.int()[:, None].expand(2, 2, -1)
    ids = torch.zeros(2, transforms.TOKENS, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"q_segment_ids": ids, "kv_positions": both[0], "q_positions": both}
    transforms.check_mapped("alibi", DEVICE, mapped, axis=-1, **options)


def test_unsupported_derivatives_are_refused() -> None:
    transforms.check_refusals("gpt_oss", DEVICE)


def test_integers_and_floats_of_any_dtype() -> None:
    given = transforms.arguments("document", DEVICE)
    want = load_op("document")(**given | {"doc": given["doc"].to(torch.int32)})
    for dtype in (torch.uint8, torch.int64):
        assert torch.equal(load_op("document")(**given | {"doc": given["doc"].to(dtype)}), want)
    given = transforms.arguments("alibi", DEVICE)
    for dtype in (torch.bfloat16, torch.float64):
        slope = given["slope"].to(dtype).requires_grad_()
        same = slope.detach().float().requires_grad_()
        grads = [
            torch.autograd.grad(load_op("alibi")(**given | {"slope": x}).square().sum(), x)[0] for x in (slope, same)
        ]
        assert grads[0].dtype == dtype
        assert torch.equal(grads[0], grads[1].to(dtype))
