"""Calls in which one tensor has another inside, such as the result of a collective that is not awaited yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from codegen.testing.golden import load_op
from generated import paging
from tests.support.cases import DEVICE
from tests.support.transforms import TOKENS, arguments

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float32", framework="torch")

ENDS = torch.tensor([0, 4, TOKENS], dtype=torch.int32)


class Wrapped(Tensor):
    """A tensor without memory: operators compute with `inside`. Results of views are wrapped, as those of torch's
    `AsyncCollectiveTensor` are."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        looks: dict[str, Any] = {"dtype": inside.dtype, "device": inside.device, "requires_grad": inside.requires_grad}
        made = Tensor._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), **looks)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        found = func(*tree_map(_inside, args), **tree_map(_inside, kwargs or {}))
        return cls(found) if func.is_view else found


def _inside(x: Any) -> Any:
    return x.inside if isinstance(x, Wrapped) else x


def gradients(given: Mapping[str, Tensor], do: Tensor, variant: str, **options: Any) -> list[Tensor]:
    """o and the gradients of all floats but wrapped ones, whose own would be accumulated in a wrapped tensor."""
    leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point() and not isinstance(x, Wrapped)]
    o: Tensor = load_op(variant)(**given, **options)
    return [o, *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("variant", "wrapped"), [("alibi", "k"), ("alibi", "slope"), ("document", "doc"), ("full", "do")]
)
def test_a_wrapped_tensor_is_read(variant: str, wrapped: str, packed: bool) -> None:
    given = arguments(variant, DEVICE, packed=packed)
    ends = {"cu_seqlens_q": ENDS.to(DEVICE)} if packed else {}
    tensors = given | ends | {"do": torch.randn_like(given["q"])}
    want = gradients(given, tensors["do"], variant, **ends)
    left = [0, *(1 + i for i, name in enumerate(name for name in given if name != "doc") if name != wrapped)]
    tensors = {name: x.detach() for name, x in tensors.items()}
    tensors[wrapped] = Wrapped(tensors[wrapped])
    do = tensors.pop("do")
    for got, i in zip(gradients(tensors, do, variant), left, strict=True):
        assert torch.equal(got, want[i])


def test_wrapped_sequences_are_read() -> None:
    given = arguments("causal", DEVICE, packed=True)
    causal = load_op("causal")
    want = causal(**given, cu_seqlens_q=ENDS.to(DEVICE))
    assert torch.equal(causal(**given, cu_seqlens_q=Wrapped(ENDS.to(DEVICE))), want)


@pytest.mark.parametrize("wrapped", ["v", "slots"])
def test_wrapped_tokens_are_written(wrapped: str) -> None:
    tokens = {name: arguments("causal", DEVICE, packed=True)[name] for name in ("k", "v")}
    new = tokens | {"slots": torch.arange(1, TOKENS + 1, dtype=torch.int32, device=DEVICE)}
    want, got = (torch.zeros(2, 4, 4, *tokens["k"].shape[1:], device=DEVICE) for _ in range(2))
    for caches, given in ((want, new), (got, new | {wrapped: Wrapped(new[wrapped])})):
        paging.append(given["k"], given["v"], caches[0], caches[1], given["slots"])
    assert torch.equal(got, want)
    paged = {"page_table": torch.arange(4, dtype=torch.int32)[None], "kv_lengths": torch.tensor([TOKENS])}
    paged = {name: x.to(DEVICE) for name, x in paged.items()}
    query = torch.randn(1, 2, 1, tokens["k"].shape[-1], device=DEVICE)
    o = load_op("causal")(query, *want, **paged)
    assert torch.equal(load_op("causal")(query, *want, **paged | {"page_table": Wrapped(paged["page_table"])}), o)
