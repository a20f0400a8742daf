"""Packed calls: sequences of any lengths one behind the other, each as a dense call of it alone would have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from tests.support.cases import DEVICE, DTYPES, MANIFEST, assert_same, evaluate, tiles, with_frameworks, with_variants
from tests.support.judge import check_call, check_results
from tests.support.operators import OperatorRecorder, check_operators
from tests.support.packings import (
    KINDS,
    MIXED,
    OFFSETS,
    SMALL_TILES,
    THREE,
    Packing,
    assert_others_same,
    draw_packed,
    spoil,
    with_kinds,
)

pytestmark = pytest.mark.covers(mode="packed", family="portable", dtype="float16", framework="torch")

SHORT = [Packing.of(15), Packing.of(1, 1, 200), Packing.of(15, 100, 200)]
LONG = [
    Packing.of(256, 500, 1000),
    pytest.param(Packing.of(15, 100, 300, 1200, 2000), marks=pytest.mark.gpu),  # 3 s each in the interpreter
]


@pytest.mark.parametrize("packing", SHORT, ids=str)
@with_variants
def test_short_sequences(variant: str, packing: Packing) -> None:
    check_call(variant, draw_packed(variant, packing, DTYPES[0]), **packing.options())


@with_variants
@pytest.mark.covers(framework="jax")
def test_short_sequences_in_jax(variant: str) -> None:
    check_call(variant, draw_packed(variant, SHORT[-1], DTYPES[0]), framework="jax", **SHORT[-1].options())


@pytest.mark.parametrize("variant", ["causal", "alibi", "forgetting", "gpt_oss"])
def test_float32(variant: str) -> None:
    packing = SHORT[-1]
    check_call(variant, draw_packed(variant, packing, torch.float32), **packing.options())


@pytest.mark.parametrize("packing", LONG, ids=str)
@with_kinds
def test_long_sequences(variant: str, packing: Packing) -> None:
    check_call(variant, draw_packed(variant, packing, DTYPES[0]), **packing.options())


@pytest.mark.parametrize(("dim", "dim_v"), [(100, 100), (80, 48), (16, 40), (192, 96)])
@pytest.mark.parametrize("variant", ["causal", "alibi", "forgetting"])
def test_head_dims(variant: str, dim: int, dim_v: int) -> None:
    check_call(variant, draw_packed(variant, THREE, DTYPES[0], dim=dim, dim_v=dim_v), **THREE.options())


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3), (2, 4)])
@with_kinds
def test_head_groups(variant: str, kv_heads: int, group: int) -> None:
    packing = Packing.of(15, 70)
    check_call(variant, draw_packed(variant, packing, DTYPES[0], kv_heads=kv_heads, group=group), **packing.options())


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (64, 16)])
@pytest.mark.parametrize("variant", ["causal", "window", "forgetting"])
def test_tiles(variant: str, block_m: int, block_n: int) -> None:
    packing = Packing.of(9, 70)
    inputs = draw_packed(variant, packing, DTYPES[0], dim=32)
    check_call(variant, inputs, config=tiles(block_m, block_n), **packing.options())


@pytest.mark.parametrize("q_offset", OFFSETS)
@with_frameworks
@with_kinds
def test_lengths_and_offsets(variant: str, framework: str, q_offset: str) -> None:
    """Sequences without queries, without keys and without either among others."""
    inputs = draw_packed(variant, MIXED, DTYPES[0])
    options = {"config": SMALL_TILES, "q_offset": OFFSETS[q_offset](), **MIXED.options()}
    got = check_call(variant, inputs, framework=framework, **options)
    assert (got["o"][MIXED.rows[2]] == 0).all()
    assert (got["lse"][:, MIXED.rows[2]] == float("-inf")).all()


@pytest.mark.parametrize("q_offset", ["end", "tensor"])
@pytest.mark.parametrize("variant", [name for name in MANIFEST if name not in KINDS])
def test_lengths_and_offsets_of_the_others(variant: str, q_offset: str) -> None:
    inputs = draw_packed(variant, MIXED, DTYPES[0])
    check_call(variant, inputs, q_offset=OFFSETS[q_offset](), **MIXED.options())


EMPTY = {
    "one": Packing.of(70),
    "first": Packing.of(40, 40, 40),
    "last": Packing.of(0, 0, 40),
    "middle": Packing.of(0, 40, 40),
    "no_keys": Packing(q=(0, 9, 30), k=(0, 0, 25)),
    "no_queries": Packing(q=(0, 0, 30), k=(0, 9, 25)),
}


@pytest.mark.parametrize("packing", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("variant", ["causal", "forgetting", "gpt_oss", "document", "natten"])
def test_empty_sequences(variant: str, packing: Packing) -> None:
    check_call(variant, draw_packed(variant, packing, DTYPES[0]), **packing.options())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "packing",
    [Packing.of(0), Packing.of(0, 0), Packing(q=(0, 0, 0), k=(0, 4, 9)), Packing(q=(0, 4, 9), k=(0, 0, 0))],
    ids=["none", "two", "no_queries", "no_keys"],
)
@with_variants
def test_no_pairs(variant: str, packing: Packing) -> None:
    inputs = draw_packed(variant, packing)
    got = evaluate(variant, inputs, **packing.options())
    assert got["o"].shape == inputs.do.shape
    assert (got["o"] == 0).all()
    want_lse = torch.full_like(inputs.dlse, float("-inf"))
    if MANIFEST[variant]["sink"]:
        want_lse = inputs.tensors["sink"].detach()[:, None].expand_as(inputs.dlse)
        torch.testing.assert_close(got["dsink"], inputs.dlse.sum(1))
    torch.testing.assert_close(got["lse"], want_lse)
    for name, leaf in inputs.leaves().items():
        assert got[f"d{name}"].shape == leaf.shape, name
        assert name == "sink" or (got[f"d{name}"] == 0).all(), name


@with_kinds
def test_the_same_lengths_need_no_second_argument(variant: str) -> None:
    inputs = draw_packed(variant, THREE)
    want = evaluate(variant, inputs, **THREE.options())
    got = evaluate(variant, inputs, cu_seqlens_q=THREE.options()["cu_seqlens_q"])
    for name, wanted in want.items():
        assert_same(variant, name, got[name], wanted)


@with_variants
def test_one_sequence_is_a_dense_call(variant: str) -> None:
    """Of other bits, as another kernel may sum in another order: each result is rounded, hence twice the bound."""
    packing = Packing.of(70)
    inputs = draw_packed(variant, packing, DTYPES[0])
    got = evaluate(variant, inputs, **packing.options())

    def dense(x: Tensor) -> Tensor:
        return x.detach().transpose(0, 1)[None].requires_grad_(x.requires_grad)

    def own(name: str, x: Tensor) -> Tensor:
        dims = MANIFEST[variant]["tensors"].get(name, {"dims": ()})["dims"]
        packed = name == "g" or not {"q_idx", "kv_idx"}.isdisjoint(dims)
        return x.detach()[None].requires_grad_(x.requires_grad) if packed else x

    alone = replace(
        inputs,
        q=dense(inputs.q),
        k=dense(inputs.k),
        v=dense(inputs.v),
        do=dense(inputs.do),
        dlse=inputs.dlse[None],
        tensors={name: own(name, x) for name, x in inputs.tensors.items()},
    )
    want = evaluate(variant, alone)
    want |= {name: want[name][0].transpose(0, 1) for name in ("o", "dq", "dk", "dv")}
    want = {name: x.reshape(got[name].shape) for name, x in want.items()}
    errors = golden.relative_errors(got, want)
    assert max(errors.values()) <= 2 * golden.BOUND[DTYPES[0]], errors


@pytest.mark.parametrize(("number", "value"), [(1, float("nan")), (2, float("inf"))])
@with_kinds
def test_sequences_do_not_see_each_other(variant: str, number: int, value: float) -> None:
    """Whatever one sequence holds, every bit of the others stays."""
    inputs = draw_packed(variant, THREE, dim=32)
    want = evaluate(variant, inputs, config=SMALL_TILES, **THREE.options())
    spoilt = spoil(inputs, THREE, number, value)
    got = evaluate(variant, spoilt, config=SMALL_TILES, **THREE.options())
    assert not got["o"][THREE.rows[number]].isfinite().all()
    assert_others_same(THREE, number, got, want)


@pytest.mark.parametrize("variant", [name for name in MANIFEST if "packed" in MANIFEST[name]["deterministic"]])
def test_same_inputs_same_bits(variant: str) -> None:
    inputs = draw_packed(variant, THREE, DTYPES[0])
    first, second = (evaluate(variant, inputs, **THREE.options()) for _ in range(2))
    for name, got in second.items():
        assert torch.equal(got, first[name]), name


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.usefixtures("poisoned_memory")
@with_variants
def test_every_element_is_written(variant: str) -> None:
    """Between sequences too: their last blocks are cut, and some have none."""
    inputs = draw_packed(variant, MIXED, dim=40, dim_v=24)
    check_results(
        variant,
        inputs,
        evaluate(variant, inputs, config=tiles(32, 64), **MIXED.options()),
        ratios=False,
        **MIXED.options(),
    )


def _in_nan(x: Tensor) -> Tensor:
    """Inside a larger tensor of NaN: between tokens and heads, and before and behind each."""
    outer = x.new_full([size + 5 for size in x.shape], float("nan"))
    inner = outer[tuple(slice(2, 2 + size) for size in x.shape)]
    inner.copy_(x)
    return inner


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "in_nan": _in_nan,
    "every_other": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("variant", ["causal", "forgetting"])
def test_any_strides(variant: str, stored: str) -> None:
    inputs = draw_packed(variant, THREE, dim=40, dim_v=24)
    q, k, v = (STORED[stored](x.detach()).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    inputs = replace(inputs, q=q, k=k, v=v, do=STORED[stored](inputs.do))
    check_results(variant, inputs, evaluate(variant, inputs, **THREE.options()), ratios=False, **THREE.options())


@with_kinds
def test_slices_of_one_projection(variant: str) -> None:
    """q, k and v as views of one `[total, 3, H, D]` tensor; the gradient arrives in it."""
    inputs = draw_packed(variant, THREE, kv_heads=2)
    want = evaluate(variant, inputs, **THREE.options())
    fused = torch.stack([x.detach() for x in (inputs.q, inputs.k, inputs.v)], 1).requires_grad_()
    q, k, v = fused.unbind(1)
    assert not q.is_contiguous()
    o, lse = replace(inputs, q=q, k=k, v=v).call(golden.load_op(variant), return_lse=True, **THREE.options())
    (grad,) = torch.autograd.grad((o, lse), [fused], (inputs.do, inputs.dlse))
    dq, dk, dv = grad.unbind(1)
    for name, got in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        torch.testing.assert_close(got.detach(), want[name], rtol=2e-3, atol=2e-3, msg=name)


@with_kinds
def test_autocast(variant: str) -> None:
    """float32 arguments are computed in autocast's dtype; their gradients come back in float32."""
    inputs = draw_packed(variant, THREE, torch.float32)
    with torch.autocast(DEVICE, dtype=DTYPES[0]):
        o, lse = inputs.call(golden.load_op(variant), return_lse=True, **THREE.options())
    assert o.dtype == DTYPES[0]
    assert lse.dtype == torch.float32
    leaves = inputs.leaves()
    got = torch.autograd.grad((o, lse), list(leaves.values()), (inputs.do.to(o.dtype), inputs.dlse))

    def cast(x: Tensor) -> Tensor:
        return x.detach().to(DTYPES[0]).requires_grad_(x.requires_grad)

    low = replace(inputs, q=cast(inputs.q), k=cast(inputs.k), v=cast(inputs.v), do=cast(inputs.do))
    want = evaluate(variant, low, **THREE.options())
    assert torch.equal(o, want["o"])
    for (name, leaf), grad in zip(leaves.items(), got, strict=True):
        assert grad.dtype == leaf.dtype
        assert_same(variant, f"d{name}", grad, want[f"d{name}"].to(leaf.dtype))


@with_variants
def test_compiled_equals_eager(variant: str) -> None:
    """One graph, whose inputs the ends of the sequences are."""
    op = golden.load_op(variant)

    def model(q: Tensor, k: Tensor, v: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
        o, lse = op(q * 2, k, v, **own)
        return o * 2, lse

    inputs = draw_packed(variant, THREE, dim=32)
    ends = {"cu_seqlens_q": THREE.options()["cu_seqlens_q"]}  # of the keys too
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = golden.evaluate(compiled, inputs, **ends)
    for name, wanted in golden.evaluate(model, inputs, **ends).items():
        assert_same(variant, name, got[name], wanted)
        assert got[name].stride() == wanted.stride(), name


@with_kinds
def test_opcheck(variant: str) -> None:
    """One of the sequences is empty."""
    packing = Packing.of(5, 5, 22)
    inputs = draw_packed(variant, packing, dim=16)
    with OperatorRecorder() as recorder:
        evaluate(variant, inputs, **packing.options())
    names = [func.name() for func, _ in recorder.calls]
    assert names == [f"generated::{variant}_packed_fwd", f"generated::{variant}_packed_bwd"]
    check_operators(recorder.calls)
