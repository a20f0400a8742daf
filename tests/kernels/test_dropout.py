"""Dropout on the probabilities: which pairs are dropped, in every kernel the same, and what in a call decides it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing import calls, golden
from generated._runtime.core.checks import ArgumentError
from generated._runtime.torch.philox import dropout_words
from tests.support.cases import DEVICE, DTYPES, INTERPRET, MANIFEST, Shape, draw, evaluate, tiles, variants_where

with_dropout = pytest.mark.parametrize("variant", variants_where(lambda name: MANIFEST[name]["dropout"]))
SHAPE = Shape(batch=2, kv_heads=1, group=2, q_len=40)
KEPT = 2**31 + 2**30  # words from here on are kept at dropout_p = 0.75


def with_numbers(inputs: golden.Inputs, **numbers: Any) -> golden.Inputs:
    return replace(inputs, scalars=inputs.scalars | numbers)


def kept_by_forward_and_backward(variant: str, shape: Shape, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The pairs `[B, Hq, Sq, Skv]` that keep their probability, read from o and from dv: v and do are unit matrices."""
    inputs = draw(variant, shape, dtype)
    v, do = torch.zeros_like(inputs.v), torch.zeros_like(inputs.do)
    v.diagonal(dim1=2, dim2=3).fill_(1)
    do.diagonal(dim1=2, dim2=3).fill_(1)
    inputs = with_numbers(replace(inputs, v=v.requires_grad_(), do=do), dropout_p=0.75, seed=17)
    # The query offset is so large that a causal mask hides no key.
    got = evaluate(variant, inputs, q_offset=shape.keys, **options)
    return [got["o"] > 0, got["dv"].mT > 0]


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (64, 32), (32, 128)])
@with_dropout
def test_forward_and_backward_drop_the_same_whatever_the_tiles(variant: str, block_m: int, block_n: int) -> None:
    shape = Shape(batch=2, kv_heads=3, group=1, q_len=90, dim=32, dim_v=90)
    words = dropout_words(17, (2, 3, 90, 90), torch.device(DEVICE), row_offset=90)
    for kept in kept_by_forward_and_backward(variant, shape, DTYPES[0], config=tiles(block_m, block_n)):
        assert torch.equal(kept, words >= KEPT)


@with_dropout
def test_a_part_of_the_keys_drops_what_the_whole_does(variant: str) -> None:
    """For dropout, rows are counted from `q_offset + 32` on, and keys from 64 on."""
    shape = Shape(batch=2, kv_heads=2, group=1, q_len=40, dim=16, dim_v=40)
    words = dropout_words(17, (2, 2, 40, 104), torch.device(DEVICE), row_offset=40 + 32)[..., 64:]
    own = dropout_words(17, (2, 2, 40, 40), torch.device(DEVICE), row_offset=40 + 32, key_offset=64)
    assert torch.equal(own, words)
    for kept in kept_by_forward_and_backward(variant, shape, DTYPES[0], dropout_origin=(0, 0, 2, 32, 64)):
        assert torch.equal(kept, words >= KEPT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
@with_dropout
def test_neither_dtype_nor_head_groups_change_what_is_dropped(variant: str, group: int, dtype: torch.dtype) -> None:
    shape = Shape(batch=2, kv_heads=6 // group, group=group, q_len=20, kv_len=40, dim=16, dim_v=40)
    kept, _ = kept_by_forward_and_backward(variant, shape, dtype)
    assert torch.equal(kept, dropout_words(17, (2, 6, 20, 40), torch.device(DEVICE), row_offset=40) >= KEPT)


@with_dropout
def test_layouts_drop_the_same(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    want = inputs.call(golden.load_op(variant))
    q, k, v = (x.detach().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    swapped = replace(inputs, q=q, k=k, v=v).call(golden.load_op(variant), layout="bshd")
    assert torch.equal(swapped.transpose(1, 2), want)


@with_dropout
def test_the_seed_decides(variant: str) -> None:
    """All bits of the seed decide which pairs are dropped. lse does not depend on dropout."""
    inputs = draw(variant, SHAPE)
    found = [evaluate(variant, with_numbers(inputs, seed=seed)) for seed in (0, 0, 1, 2**32, 2**63 - 1)]
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(found[0][name], found[1][name]), name
    for i, one in enumerate(found[1:]):
        assert torch.equal(one["lse"], found[0]["lse"])
        for other in found[i + 2 :]:
            assert not torch.equal(one["o"], other["o"])
            assert not torch.equal(one["dk"], other["dk"])


def _without_dropout(variant: str) -> str | None:
    """The variant that is the same except that it has no dropout."""
    same = ("mask", "score", "tensors", "scalars", "sink", "decay")
    twins = variants_where(lambda name: not MANIFEST[name]["dropout"])
    return next((name for name in twins if all(MANIFEST[name][key] == MANIFEST[variant][key] for key in same)), None)


@with_dropout
def test_a_dropout_of_zero_is_none(variant: str) -> None:
    """Bit for bit, with the same family and tiles, which are tuned separately for each variant.

    Compiled, dk may differ in its last bit: without dropout its sums start from another number.
    """
    twin = _without_dropout(variant)
    if twin is None:
        pytest.skip(f"the package has no {variant} without dropout")
    inputs = draw(variant, SHAPE)
    plain = replace(
        inputs, scalars={name: x for name, x in inputs.scalars.items() if name not in ("dropout_p", "seed")}
    )
    chosen = {"family": "portable", "config": tiles(32, 32)}
    want = evaluate(twin, plain, **chosen)
    for numbers in ({}, {"dropout_p": 0}, {"dropout_p": 0.0, "seed": 5}, {"dropout_p": 2.0**-34, "seed": 5}):
        got = evaluate(variant, with_numbers(plain, **numbers), **chosen)
        for name in want if INTERPRET else want.keys() - {"dk"}:
            assert torch.equal(got[name], want[name]), (name, numbers)


@with_dropout
def test_a_seed_not_given_comes_from_torch(variant: str) -> None:
    inputs = with_numbers(draw(variant, Shape(q_len=40)), seed=None)
    torch.manual_seed(3)
    first, second = evaluate(variant, inputs), evaluate(variant, inputs)
    assert not torch.equal(first["o"], second["o"])
    torch.manual_seed(3)
    for name, got in evaluate(variant, inputs).items():
        assert torch.equal(got, first[name]), name
    state = torch.get_rng_state()
    for numbers in ({"dropout_p": 0.0}, {"seed": 1}):
        evaluate(variant, with_numbers(inputs, **numbers))
    assert torch.equal(torch.get_rng_state(), state)


@with_dropout
def test_compiled_once_for_all_seeds(variant: str) -> None:
    graphs = 0

    def counting(graph: Any, _examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    op = golden.load_op(variant)
    compiled = torch.compile(op, fullgraph=True, backend=counting)
    inputs = draw(variant, Shape(q_len=40))
    with torch.no_grad():
        for seed in (5, 6, 2**40, 2**63 - 1):
            same = with_numbers(inputs, seed=seed)
            assert torch.equal(same.call(compiled), same.call(op))
    assert graphs <= 2


@with_dropout
def test_compiled_without_a_seed(variant: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(golden.load_op(variant), fullgraph=True, backend="eager")
    inputs = with_numbers(draw(variant, Shape(q_len=9)), seed=None)
    with pytest.raises(Exception, match=r"seed: expected an int under torch\.compile"):
        inputs.call(compiled)


@pytest.mark.parametrize("q_offset", [-40, 7, 35, (16, -3)])
@with_dropout
def test_rows_are_counted_from_the_query_offset_on(variant: str, q_offset: int | tuple[int, ...]) -> None:
    """The offset is rounded down to a multiple of 16. Rows then drop what these rows drop in a call with more rows."""
    shape = Shape(batch=2, kv_heads=2, group=2, q_len=24, dim=16)
    inputs = with_numbers(draw(variant, shape), dropout_p=0.75, seed=17)
    offset = torch.tensor(q_offset, device=DEVICE) if isinstance(q_offset, tuple) else q_offset
    o = inputs.call(golden.load_op(variant), q_offset=offset)
    want = calls.load_reference(variant)
    tensors = {name: x.detach().double() for name, x in inputs.tensors.items()}
    q, k, v = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v))
    close = want(q, k, v, **tensors, **inputs.scalars, q_offset=offset)
    torch.testing.assert_close(o.double(), close, rtol=2e-3, atol=2e-3)
    by_batch = torch.as_tensor(q_offset, device=DEVICE).expand(2).view(2, 1, 1, 1)
    words = dropout_words(17, (2, 4, 24, 24), torch.device(DEVICE), row_offset=by_batch)
    for b, origin in enumerate(by_batch.flatten().tolist()):
        for row in range(24):
            place = origin // 16 * 16 + row
            if place >= 0:
                alone = dropout_words(17, (2, 4, place + 1, 24), torch.device(DEVICE))[:, :, -1:]
                assert torch.equal(words[b, :, row], alone[b, :, 0])


@with_dropout
def test_a_part_of_the_heads_and_batch_rows_drops_what_the_whole_does(variant: str) -> None:
    shape = Shape(batch=3, kv_heads=4, group=2, q_len=40, dim=16)
    inputs = draw(variant, shape)
    op = golden.load_op(variant)
    o = inputs.call(op)
    want = torch.autograd.grad(o, [inputs.q, inputs.k, inputs.v], inputs.do)
    heads, keys = slice(2, 6), slice(1, 3)
    parts = (inputs.q[1:, heads], inputs.k[1:, keys], inputs.v[1:, keys])
    leaves = [x.detach().requires_grad_() for x in parts]
    tensors = {name: x.detach() for name, x in inputs.tensors.items()}
    part = op(*leaves, **tensors, **inputs.scalars, dropout_origin=(1, 2, 8))
    assert torch.equal(part, o[1:, heads])
    found = torch.autograd.grad(part, leaves, inputs.do[1:, heads])
    for name, x, whole, own in zip("qkv", found, want, (heads, keys, keys), strict=True):
        assert torch.equal(x, whole[1:, own]), name
    assert not torch.equal(op(*leaves, **tensors, **inputs.scalars), part)


ORIGINS = "None, (batch row, head, heads) or (batch row, head, heads, row, key)"

BAD = [
    ("dropout_p", 1, "a number from 0 to below 1, got 1"),
    ("dropout_p", -0.1, "a number from 0 to below 1, got -0.1"),
    ("dropout_p", float("nan"), "a number from 0 to below 1, got nan"),
    ("dropout_p", True, "a number from 0 to below 1, got True"),
    ("dropout_p", "0.1", "a number from 0 to below 1, got '0.1'"),
    ("dropout_p", None, "a number from 0 to below 1, got None"),
    ("dropout_origin", 3, f"{ORIGINS}, got 3"),
    ("dropout_origin", (0, 0, 8, 16), f"{ORIGINS}, got (0, 0, 8, 16)"),
    ("dropout_origin", (0, -1, 8), f"{ORIGINS}, integers from 0 on, got (0, -1, 8)"),
    ("dropout_origin", (0, 7, 8), "a head and heads with room for q's 2, got (0, 7, 8)"),
    ("dropout_origin", (2**28, 0, 8), "a batch row times heads, plus head, below 2**31, got (268435456, 0, 8)"),
    ("dropout_origin", (0, 0, 8, 8, 0), "a row that is a multiple of 16, got (0, 0, 8, 8, 0)"),
    ("dropout_origin", (0, 0, 8, 0, 16), "a key that is a multiple of 32, got (0, 0, 8, 0, 16)"),
    ("dropout_origin", (0, np.int64(-1), 8), f"{ORIGINS}, integers from 0 on, got (0, -1, 8)"),
    ("dropout_origin", (0, np.int32(7), 8), "a head and heads with room for q's 2, got (0, 7, 8)"),
    ("dropout_origin", (0, 0, 8, np.int64(8), 0), "a row that is a multiple of 16, got (0, 0, 8, 8, 0)"),
    ("dropout_origin", (0, 0, 8, torch.tensor(8), 0), "a row that is a multiple of 16, got (0, 0, 8, 8, 0)"),
    ("dropout_origin", (0, np.float32(1), 8), f"{ORIGINS}, integers from 0 on, got (0, 1.0, 8)"),
    ("dropout_origin", (0, torch.tensor([1]), 8), f"{ORIGINS}, integers from 0 on, got (0, tensor([1]), 8)"),
    ("seed", 0.5, "an int from 0 to 2**63 - 1 or None, got 0.5"),
    ("seed", False, "an int from 0 to 2**63 - 1 or None, got False"),
    ("seed", -1, "an int from 0 to 2**63 - 1 or None, got -1"),
    ("seed", 2**63, "an int from 0 to 2**63 - 1 or None, got 9223372036854775808"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD)
@with_dropout
def test_bad_arguments(variant: str, name: str, value: object, text: str) -> None:
    inputs = with_numbers(draw(variant, Shape(q_len=9)), **{name: value})
    with pytest.raises(ArgumentError) as caught:
        inputs.call(golden.load_op(variant))
    assert str(caught.value) == f"{variant}: {name}: expected {text}"
