"""Inputs of any strides are read in place, and outputs have the memory order of q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, INTERPRET, VARIANTS, Shape, assert_same, draw, evaluate, with_variants
from tests.support.judge import check_results

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

SHAPE = Shape(batch=2, kv_heads=2, group=1, q_len=70, kv_len=90, dim=40, dim_v=24)


def _in_nan(x: Tensor) -> Tensor:
    """The same values inside a larger tensor of NaN: with NaN between, before and after rows, heads and batch rows."""
    outer = x.new_full([size + 5 for size in x.shape], float("nan"))
    inner = outer[tuple(slice(2, 2 + size) for size in x.shape)]
    inner.copy_(x)
    return inner


def _expanded(x: Tensor) -> Tensor:
    return x[:1, :, :1].expand(x.shape)


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "bhds": lambda x: x.mT.contiguous().mT,
    "in_nan": _in_nan,
    "every_other": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def restored(inputs: Inputs, store: Callable[[Tensor], Tensor]) -> Inputs:
    """The same values, stored another way."""
    q, k, v = (store(x.detach()).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v, do=store(inputs.do), dlse=inputs.dlse.mT.contiguous().mT)


def by_order(x: Tensor) -> list[int]:
    """The axes from the outermost in memory to the innermost."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


@pytest.mark.parametrize(
    ("variant", "stored"),
    # In the interpreter, each way of storing is tested with half of the variants.
    [(v, way) for row, v in enumerate(VARIANTS) for way in (list(STORED)[row % 2 :: 2] if INTERPRET else STORED)],
)
def test_stored(variant: str, stored: str) -> None:
    inputs = restored(draw(variant, SHAPE), STORED[stored])
    got = evaluate(variant, inputs)
    check_results(variant, inputs, got, ratios=False)
    if stored in ("bshd", "sbhd"):
        for name, like in (("o", inputs.q), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
            assert by_order(got[name]) == by_order(like), name


@with_variants
def test_layout_bshd(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    want = evaluate(variant, inputs)

    def swap(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)

    swapped = replace(inputs, q=swap(inputs.q), k=swap(inputs.k), v=swap(inputs.v), do=swap(inputs.do))
    got = evaluate(variant, swapped, layout="bshd")
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].is_contiguous(), name
        got[name] = got[name].transpose(1, 2)
    assert got["lse"].shape == want["lse"].shape
    check_results(variant, inputs, got, ratios=False)


@with_variants
def test_slices_of_one_projection(variant: str) -> None:
    """q, k and v as views of one `[B, S, (Hq + 2 Hkv) D]` tensor, which gets the gradient."""
    shape = Shape(batch=2, kv_heads=2, group=2, q_len=70, dim=32)
    inputs = draw(variant, shape)
    heads = [inputs.q.shape[1], inputs.k.shape[1], inputs.v.shape[1]]
    parts = [x.detach().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    fused = torch.cat(parts, 2).flatten(2).requires_grad_()
    q, k, v = fused.unflatten(2, (-1, shape.dim)).split(heads, 2)
    o, lse = golden.load_op(variant)(q, k, v, **inputs.tensors, **inputs.scalars, layout="bshd", return_lse=True)
    assert o.shape == q.shape
    assert o.is_contiguous()
    (dfused,) = torch.autograd.grad((o, lse), [fused], (inputs.do.transpose(1, 2), inputs.dlse))
    dq, dk, dv = (part.transpose(1, 2) for part in dfused.unflatten(2, (-1, shape.dim)).split(heads, 2))
    want = evaluate(variant, inputs)
    for name, got in {"o": o.transpose(1, 2), "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        torch.testing.assert_close(got.detach(), want[name], rtol=2e-3, atol=2e-3, msg=name)


@with_variants
def test_expanded_keys_values_and_gradients(variant: str) -> None:
    """Strides of 0: one key and value for all, and the gradient of a plain sum."""
    inputs = draw(variant, SHAPE)
    k, v = (_expanded(x.detach()).requires_grad_() for x in (inputs.k, inputs.v))
    do, dlse = torch.ones((), dtype=inputs.do.dtype, device=DEVICE), torch.ones((), device=DEVICE)
    same = replace(inputs, k=k, v=v, do=do.expand_as(inputs.do), dlse=dlse.expand_as(inputs.dlse))
    # No ratios: if all values are the same, plain PyTorch's roundings cancel, unlike for any other input.
    check_results(variant, same, evaluate(variant, same), ratios=False)


@with_variants
def test_negated_in_memory(variant: str) -> None:
    """Views such as `x.conj().imag`: torch negates the numbers in their memory when it reads them."""
    inputs = draw(variant, SHAPE)
    want = evaluate(variant, inputs)

    def negated(x: Tensor) -> Tensor:
        if not x.dtype.is_floating_point:
            return x
        view = torch._neg_view(-x.detach())
        assert view.is_neg()
        return view.requires_grad_(x.requires_grad)

    names = ("q", "k", "v", "do", "dlse")
    views: dict[str, Any] = {name: negated(getattr(inputs, name)) for name in names}
    own = {name: negated(x) for name, x in inputs.tensors.items()}
    got = evaluate(variant, replace(inputs, **views, tensors=own))
    for name, x in want.items():
        assert_same(variant, name, got[name], x)


@with_variants
def test_return_lse(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    op: Any = golden.load_op(variant)
    o, lse = inputs.call(op, return_lse=True)
    alone = inputs.call(op)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, o)
    assert lse.shape == inputs.q.shape[:3]
    assert lse.dtype == torch.float32
