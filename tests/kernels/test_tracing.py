"""The ops under torch.compile, fake tensors and `torch.library.opcheck`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, INTERPRET, Shape, assert_same, draw, evaluate, tiles, with_variants
from tests.support.operators import OperatorRecorder, check_operators

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

# Inductor would need a C++ compiler on the CPU, and tests nothing of the op that AOTAutograd does not test.
BACKEND = "aot_eager" if INTERPRET else "inductor"
SHAPE = Shape(batch=2, kv_heads=2, group=2, q_len=40, kv_len=50, dim=32, dim_v=16)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def scaled_op(variant: str, **options: Any) -> Any:
    """A small model around an op, with other operations before and after it."""
    op = golden.load_op(variant)

    def model(q: Tensor, k: Tensor, v: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
        o, lse = op(q * 2, k, v, **own, **options)
        return o * 2, lse

    return model


def assert_all_same(variant: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, wanted in want.items():
        assert_same(variant, name, got[name], wanted)
        assert got[name].stride() == wanted.stride(), name


@with_variants
def test_compiled_equals_eager(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    compiled = torch.compile(scaled_op(variant), fullgraph=True, backend=BACKEND)
    assert_all_same(variant, golden.evaluate(compiled, inputs), golden.evaluate(scaled_op(variant), inputs))


@with_variants
def test_compiled_with_every_option(variant: str) -> None:
    """An offset per batch row, a scale that is not positive, and q stored as [B, S, H, D]."""
    inputs = draw(variant, SHAPE, positions=70)
    q = inputs.q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    inputs = replace(inputs, q=q)
    offsets = torch.tensor([-5, 20], dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"q_offset": offsets, "scale": -0.25}
    compiled = torch.compile(scaled_op(variant, **options), fullgraph=True, backend=BACKEND)
    assert_all_same(variant, golden.evaluate(compiled, inputs), golden.evaluate(scaled_op(variant, **options), inputs))


@with_variants
def test_compiled_with_tiles(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    config = {name: tile for name, tile in tiles(32, 32).items() if name != "dq"}
    compiled = torch.compile(scaled_op(variant, config=config), fullgraph=True, backend=BACKEND)
    assert_all_same(
        variant, golden.evaluate(compiled, inputs), golden.evaluate(scaled_op(variant, config=config), inputs)
    )


@with_variants
def test_compiled_once_for_all_lengths(variant: str) -> None:
    """The third length reuses the code compiled for the second, for which torch made the lengths symbolic."""
    graphs = 0

    def counting(graph: Any, _examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(golden.load_op(variant), fullgraph=True, backend=counting)
    for length in (33, 48, 65, 70):
        inputs = draw(variant, replace(SHAPE, q_len=length, kv_len=length), scalars=_same_scalars(variant))
        with torch.no_grad():
            assert torch.equal(inputs.call(compiled), inputs.call(golden.load_op(variant)))
    assert graphs <= 2


def _same_scalars(variant: str) -> dict[str, int | float]:
    return draw(variant, SHAPE).scalars


@with_variants
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    q = inputs.q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    inputs = replace(inputs, q=q)
    want = evaluate(variant, inputs)
    with FakeTensorMode() as mode:

        def fake(x: Tensor) -> Tensor:
            return mode.from_tensor(x)

        faked = Inputs(
            q=fake(inputs.q),
            k=fake(inputs.k),
            v=fake(inputs.v),
            do=fake(inputs.do),
            dlse=fake(inputs.dlse),
            tensors={name: fake(x) for name, x in inputs.tensors.items()},
            scalars=inputs.scalars,
        )
        got = evaluate(variant, faked)
    for name, wanted in want.items():
        seen = got[name]
        assert (seen.shape, seen.stride(), seen.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), name
        assert seen.device.type == DEVICE


@with_variants
def test_opcheck(variant: str) -> None:
    inputs = draw(variant, replace(SHAPE, batch=1, q_len=17, kv_len=20))
    with OperatorRecorder() as recorder:
        evaluate(variant, inputs)
    names = [func.name() for func, _ in recorder.calls]
    assert names == [f"generated::{variant}_fwd", f"generated::{variant}_bwd"]
    check_operators(recorder.calls)
