"""Checks of derivatives and transforms of an op that hold for its kernels and for its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing.golden import load_op

TOKENS, DIM = 9, 16
Arguments = dict[str, Tensor]


def arguments(variant: str, device: str, *, lead: tuple[int, ...] = (), packed: bool = False) -> Arguments:
    """The tensors of a float32 call with two query heads and one key head, each with `lead` axes before its own."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator).to(device)

    shape = [TOKENS, 1, DIM] if packed else [2, 1, TOKENS, DIM]
    queries = [TOKENS, 2, DIM] if packed else [2, 2, TOKENS, DIM]
    found = {"q": draw(*queries), "k": draw(*shape), "v": draw(*shape)}
    rows = [TOKENS] if packed else [2, TOKENS]
    if variant in ("alibi", "gpt_oss"):
        found["slope" if variant == "alibi" else "sink"] = draw(2)
    if variant == "relative_bias":
        found["bias"] = draw(2, 5)
    if variant == "forgetting":
        found["g"] = -draw(*rows, 2).abs()
    if variant == "document":
        found["doc"] = (draw(*rows) > 0).to(torch.int64).cumsum(-1)
    return found


def called(variant: str, **options: Any) -> Callable[[Mapping[str, Tensor]], Tensor]:
    op = load_op(variant)

    def call(given: Mapping[str, Tensor]) -> Tensor:
        o, lse = op(**given, **options, return_lse=True)
        return torch.cat([o.flatten(), torch.where(lse.isinf(), 0.0, lse).flatten()])

    return call


def check_gradients_of_transforms(variant: str, device: str, **options: Any) -> None:
    """`torch.func.grad`, `vjp` and `jacrev` give what backward gives."""
    given = arguments(variant, device)
    call = called(variant, **options)
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    fixed = {name: x for name, x in given.items() if name not in leaves}
    weights = torch.randn(call(given).shape, generator=torch.Generator().manual_seed(2)).to(device)
    wanted = torch.autograd.grad((call(leaves | fixed) * weights).sum(), list(leaves.values()))
    floats = {name: given[name] for name in leaves}
    got = torch.func.grad(lambda x: (call(x | fixed) * weights).sum())(floats)
    pullback = torch.func.vjp(lambda x: call(x | fixed), floats)[1]
    rows = torch.func.jacrev(lambda x: (call(x | fixed) * weights).view(2, -1).sum(1))(floats)
    for (name, want), pulled in zip(zip(leaves, wanted, strict=True), pullback(weights)[0].values(), strict=True):
        torch.testing.assert_close(got[name], want, rtol=0, atol=0)
        torch.testing.assert_close(pulled, want, rtol=0, atol=0)
        torch.testing.assert_close(rows[name].sum(0), want, rtol=1e-5, atol=1e-5)


def check_mapped(
    variant: str, device: str, mapped: set[str], packed: bool = False, axis: int = 0, **options: Any
) -> None:
    """`vmap` over some arguments gives the results of one call after the other, and so does `vmap` of the gradients.

    `axis`: the one that is mapped. Options that are named in `mapped` have it first.
    """
    many = arguments(variant, device, lead=(2,), packed=packed)
    if "cu_seqlens_q" in mapped:
        many["cu_seqlens_q"] = torch.tensor([[0, 4, TOKENS], [0, 0, TOKENS]], device=device)
    elif packed:
        options["cu_seqlens_q"] = torch.tensor([0, 5, TOKENS], dtype=torch.int32, device=device)
    many |= {name: options.pop(name) for name in mapped & set(options)}
    given = {name: x if name in mapped else x[0] for name, x in many.items()}
    axes = {name: axis if name in mapped else None for name in given}
    call = called(variant, **options)

    def gradients(x: Arguments) -> Arguments:
        floats = {name: one for name, one in x.items() if one.is_floating_point()}
        found: Arguments = torch.func.grad(lambda own: call(x | own).square().sum())(floats)
        return found

    each = [{name: x[i] if name in mapped else x for name, x in given.items()} for i in range(2)]
    # Elements of another axis than the first are views with gaps.
    given = {name: x.movedim(0, axis).contiguous() if name in mapped else x for name, x in given.items()}
    got = torch.func.vmap(call, in_dims=(axes,))(given)
    torch.testing.assert_close(got, torch.stack([call(one) for one in each]), rtol=1e-6, atol=1e-6)
    found, wanted = torch.func.vmap(gradients, in_dims=(axes,))(given), [gradients(one) for one in each]
    for name, x in found.items():
        torch.testing.assert_close(x, torch.stack([one[name] for one in wanted]), rtol=1e-5, atol=1e-5)


def check_refusals(variant: str, device: str) -> None:
    """Second derivatives and forward mode raise an error of the op's own; `create_graph` alone does not."""
    call, given = called(variant), arguments(variant, device)

    def of_queries(q: Tensor) -> Tensor:
        return call(given | {"q": q})

    def gradient_of(q: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda q: of_queries(q).sum())(q)
        return found

    q = given["q"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(of_queries(q).sum(), q, create_graph=True)
    assert gradient.requires_grad
    second = pytest.raises(NotImplementedError, match=f"{variant}: second derivatives")
    with second:
        gradient.square().sum().backward()
    with second:
        torch.func.grad(lambda q: gradient_of(q).sum())(given["q"])
    with pytest.raises(NotImplementedError, match=f"{variant}: q: derivatives in forward mode"):
        torch.func.jvp(of_queries, (given["q"],), (given["q"],))
    forward_mode = pytest.raises(NotImplementedError, match=f"{variant}: derivatives in forward mode")
    with forward_mode:
        torch.func.hessian(lambda q: of_queries(q).sum())(given["q"])
    with forward_mode:
        torch.func.jvp(gradient_of, (given["q"],), (given["q"],))
    with pytest.raises(NotImplementedError):
        torch.func.jacfwd(gradient_of)(given["q"])
