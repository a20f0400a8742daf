"""Kernels under the transforms of torch.func, and derivatives that they do not have."""

from __future__ import annotations

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
    ],
)
def test_vmap_is_one_call_after_the_other(variant: str, mapped: set[str], packed: bool) -> None:
    transforms.check_mapped(variant, DEVICE, mapped, packed)


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
