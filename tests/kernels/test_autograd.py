"""Which gradients a call returns, equal bits for equal calls, and autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support.cases import (
    DEVICE,
    DTYPES,
    INTERPRET,
    MANIFEST,
    Shape,
    assert_same,
    draw,
    evaluate,
    variants_where,
    with_variants,
)

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

LARGE = Shape(batch=2, kv_heads=2, group=3, q_len=1000)


def frozen_but(inputs: Inputs, trained: str) -> Inputs:
    """The same call, in which only `trained` requires a gradient."""

    def leaf(name: str, x: Tensor) -> Tensor:
        return x.detach().requires_grad_(name == trained)

    return replace(
        inputs,
        q=leaf("q", inputs.q),
        k=leaf("k", inputs.k),
        v=leaf("v", inputs.v),
        tensors={name: leaf(name, x) for name, x in inputs.tensors.items()},
    )


@with_variants
def test_the_gradient_of_one_argument_alone(variant: str) -> None:
    inputs = draw(variant, Shape(q_len=33))
    want = evaluate(variant, inputs)
    for name in inputs.leaves():
        alone = frozen_but(inputs, name)
        o, lse = alone.call(golden.load_op(variant), return_lse=True)
        torch.autograd.backward((o, lse), (alone.do, alone.dlse))
        arguments = {"q": alone.q, "k": alone.k, "v": alone.v, **alone.tensors}
        grads = {key: x.grad for key, x in arguments.items()}
        assert {key for key, grad in grads.items() if grad is not None} == {name}
        got = grads[name]
        assert got is not None
        assert_same(variant, f"d{name}", got, want[f"d{name}"])


@with_variants
def test_without_leaves_nothing_is_recorded(variant: str) -> None:
    o, lse = frozen_but(draw(variant, Shape(q_len=20)), "").call(golden.load_op(variant), return_lse=True)
    assert not o.requires_grad
    assert not lse.requires_grad


@with_variants
def test_a_loss_of_o_or_of_lse_alone(variant: str) -> None:
    """The gradients are those of a loss of both in which the other's gradient is zero."""
    inputs = draw(variant, Shape(q_len=33))
    leaves = inputs.leaves()
    zero = {"o": torch.zeros_like(inputs.do), "lse": torch.zeros_like(inputs.dlse)}
    for index, alone in enumerate(("o", "lse")):
        output = inputs.call(golden.load_op(variant), return_lse=True)[index]
        got = torch.autograd.grad(output, list(leaves.values()), inputs.dlse if index else inputs.do, allow_unused=True)
        other = replace(inputs, dlse=zero["lse"]) if alone == "o" else replace(inputs, do=zero["o"])
        want = evaluate(variant, other)
        for name, grad in zip(leaves, got, strict=True):
            assert_same(variant, f"d{name}", grad, want[f"d{name}"])


@pytest.mark.parametrize("variant", variants_where(lambda name: "dense" in MANIFEST[name]["deterministic"]))
def test_same_inputs_same_bits(variant: str) -> None:
    inputs = draw(variant, Shape(q_len=70, group=3) if INTERPRET else LARGE, DTYPES[0])
    # Without `deterministic`, Hopper's backward sums dq in any order.
    first, second = (evaluate(variant, inputs, deterministic=True) for _ in range(2))
    for name, got in second.items():
        assert torch.equal(got, first[name]), name


@with_variants
def test_gradients_twice(variant: str) -> None:
    """`retain_graph` keeps the tensors that the backward needs."""
    inputs = draw(variant, Shape(q_len=33))
    o = inputs.call(golden.load_op(variant))
    first = torch.autograd.grad(o, inputs.v, inputs.do, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(o, inputs.v, inputs.do)[0])


@with_variants
def test_the_second_derivative_is_refused(variant: str) -> None:
    inputs = draw(variant, Shape(q_len=9))
    o = inputs.call(golden.load_op(variant))
    (dq,) = torch.autograd.grad(o.float().square().sum(), inputs.q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{variant}: second derivatives"):
        dq.float().sum().backward()


@with_variants
def test_autocast(variant: str) -> None:
    """float32 arguments are computed in autocast's dtype; their gradients come back in float32."""
    inputs = draw(variant, Shape(q_len=33), torch.float32)
    with torch.autocast(DEVICE, dtype=DTYPES[0]):
        o, lse = inputs.call(golden.load_op(variant), return_lse=True)
    assert o.dtype == DTYPES[0]
    assert lse.dtype == torch.float32
    leaves = inputs.leaves()
    got = torch.autograd.grad((o, lse), list(leaves.values()), (inputs.do.to(o.dtype), inputs.dlse))

    def cast(x: Tensor) -> Tensor:
        return x.detach().to(DTYPES[0]).requires_grad_(x.requires_grad)

    low = replace(inputs, q=cast(inputs.q), k=cast(inputs.k), v=cast(inputs.v), do=cast(inputs.do))
    want = evaluate(variant, low)
    assert torch.equal(o, want["o"])
    for (name, leaf), grad in zip(leaves.items(), got, strict=True):
        assert grad.dtype == leaf.dtype
        assert_same(variant, f"d{name}", grad, want[f"d{name}"].to(leaf.dtype))
