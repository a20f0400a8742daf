"""Packed calls: sequences of any lengths one behind the other, each as a dense call of it alone would have it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from generated._runtime.torch import sequences as torch_sequences
from tests.support.cases import (
    DEVICE,
    DTYPES,
    MANIFEST,
    assert_same,
    draw,
    evaluate,
    tiles,
    with_frameworks,
    with_variants,
)
from tests.support.cases import Shape as DenseShape
from tests.support.judge import check_call, check_results
from tests.support.packings import MIXED, Packing, draw_packed

pytestmark = pytest.mark.covers(mode="packed", family="portable", dtype="float16", framework="torch")

# What is different from one to the next: a second bound, a read of positions, a derivative, a vector of its own, none.
KINDS = ("causal", "window", "alibi", "softcap", "forgetting")
with_kinds = pytest.mark.parametrize("variant", KINDS)

SHORT = [Packing.of(15), Packing.of(1, 1, 200), Packing.of(15, 100, 200)]
LONG = [
    Packing.of(256, 500, 1000),
    pytest.param(Packing.of(15, 100, 300, 1200, 2000), marks=pytest.mark.gpu),  # 3 s each in the interpreter
]
THREE = Packing.of(9, 60, 81)
SMALL_TILES = tiles(32, 32)


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


OFFSETS: dict[str, Callable[[], Any]] = {
    "0": lambda: 0,
    "end": lambda: "end",
    "13": lambda: 13,
    "-9": lambda: -9,
    "tensor": lambda: torch.tensor([30, 0, -20, 50, 7], dtype=torch.int32, device=DEVICE),
}


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


def spoil(inputs: Inputs, packing: Packing, number: int, value: float) -> Inputs:
    """The same call, of one sequence's keys and values each one row."""

    def spoilt(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x[packing.keys[number]] = value
        return x.requires_grad_()

    return replace(inputs, k=spoilt(inputs.k), v=spoilt(inputs.v))


def assert_others_same(packing: Packing, number: int, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same bits for all tokens but one sequence's."""
    for name, wanted in want.items():
        where = packing.rows if name in ("o", "lse", "dq") else packing.keys
        if name in ("o", "dq", "lse", "dk", "dv", "dg"):
            axis = 1 if name == "lse" else 0
            for other in range(packing.sequences):
                if other != number:
                    rows = torch.arange(wanted.shape[axis], device=wanted.device)[where[other]]
                    assert torch.equal(got[name].index_select(axis, rows), wanted.index_select(axis, rows)), name


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


def _schedule(variant: str, inputs: Inputs, **options: Any) -> Any:
    return make_schedule(golden.load_op(variant), inputs, config=SMALL_TILES, **options)


def _scheduled(variant: str, inputs: Inputs, schedule: Any, **options: Any) -> dict[str, Tensor]:
    return evaluate(variant, inputs, **{"config": SMALL_TILES, "schedule": schedule, **options})


@with_variants
def test_a_schedule_changes_no_bit(variant: str) -> None:
    inputs = draw_packed(variant, MIXED, dim=32)
    options = {"q_offset": OFFSETS["tensor"](), **MIXED.options()}
    schedule = _schedule(variant, inputs, **options)
    want = _scheduled(variant, inputs, None, **options)
    for _ in range(2):
        for name, got in _scheduled(variant, inputs, schedule, **options).items():
            assert_same(variant, name, got, want[name])


@with_kinds
def test_a_schedule_of_a_forward_alone(variant: str) -> None:
    inputs = draw_packed(variant, THREE, dim=32)
    schedule = _schedule(variant, inputs, backward=False, **THREE.options())
    want = _scheduled(variant, inputs, None, **THREE.options())
    for name, got in _scheduled(variant, inputs, schedule, **THREE.options()).items():
        assert_same(variant, name, got, want[name])


PACKED_90 = Packing.of(15, 90)
# What is different from the call that the schedule was made for.
OTHERS: dict[str, tuple[Packing, dict[str, Any]]] = {
    "total": (Packing.of(15, 80), {}),
    "sequences": (Packing.of(15, 40, 90), {}),
    "keys": (Packing(q=(0, 15, 90), k=(0, 15, 80)), {}),
    "tiles": (PACKED_90, {"config": tiles(64, 64)}),
    "offset": (PACKED_90, {"q_offset": 7}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_schedule_of_another_packed_call_is_refused(other: str) -> None:
    schedule = _schedule("causal", draw_packed("causal", PACKED_90, dim=32), **PACKED_90.options())
    packing, options = OTHERS[other]
    inputs = draw_packed("causal", packing, dim=32)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", inputs, schedule, **packing.options(), **options)


def test_a_packed_schedule_of_another_op_is_refused() -> None:
    schedule = _schedule("causal", draw_packed("causal", PACKED_90, dim=32), **PACKED_90.options())
    inputs = draw_packed("window", PACKED_90, dim=32)
    with pytest.raises(ArgumentError, match=r"^window: schedule: expected one made by window.schedule, got "):
        _scheduled("window", inputs, schedule, **PACKED_90.options())


def test_a_schedule_is_for_packed_or_for_dense_calls() -> None:
    """Of as many rows and heads."""
    packed, dense = draw_packed("causal", Packing.of(90), dim=32), draw("causal", DenseShape(q_len=90, dim=32))
    options = Packing.of(90).options()
    of_packed, of_dense = _schedule("causal", packed, **options), _schedule("causal", dense)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", dense, of_packed)
    with pytest.raises(ArgumentError, match=r"^causal: schedule: expected .*, got "):
        _scheduled("causal", packed, of_dense, **options)


def _ints(*values: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# What is changed in a good call of `causal` of 20 rows, and the argument that the error names.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "dtype": (lambda: {"cu_seqlens_q": _ints(0, 20, dtype=torch.float32)}, "cu_seqlens_q"),
    "dtype_of_k": (lambda: {"cu_seqlens_k": _ints(0, 9, 20, dtype=torch.float32)}, "cu_seqlens_k"),
    "list": (lambda: {"cu_seqlens_q": [0, 20]}, "cu_seqlens_q"),
    "two_dims": (lambda: {"cu_seqlens_q": _ints(0, 9, 20)[None]}, "cu_seqlens_q"),
    "empty": (lambda: {"cu_seqlens_q": _ints()}, "cu_seqlens_q"),
    "device": (lambda: {"cu_seqlens_q": _ints(0, 9, 20, device="meta")}, "cu_seqlens_q"),
    "lengths": (lambda: {"cu_seqlens_k": _ints(0, 20)}, "cu_seqlens_k"),
    "only_k": (lambda: {"cu_seqlens_q": None, "cu_seqlens_k": _ints(0, 9, 20)}, r"\w+"),
    "rank_of_q": (lambda: {"q": torch.zeros(1, 2, 20, 32, dtype=torch.float16, device=DEVICE)}, "q"),
    "segments": (lambda: {"q_segment_ids": _ints(*[0] * 20)[None]}, r"\w+"),
    "positions": (lambda: {"q_positions": _ints(*range(20))[None]}, r"\w+"),
    "kv_lengths": (lambda: {"kv_lengths": _ints(20)}, r"\w+"),
    "offsets": (lambda: {"q_offset": _ints(0, 0, 0)}, "q_offset"),
    # Seen in the values.
    "start": (lambda: {"cu_seqlens_q": _ints(1, 9, 20)}, "cu_seqlens_q"),
    "decreases": (lambda: {"cu_seqlens_q": _ints(0, 21, 20)}, "cu_seqlens_q"),
    "end": (lambda: {"cu_seqlens_q": _ints(0, 9, 19)}, "cu_seqlens_q"),
    "end_of_k": (lambda: {"cu_seqlens_k": _ints(0, 9, 21)}, "cu_seqlens_k"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU values are looked at only where a synchronisation does not matter.
    monkeypatch.setattr(torch_sequences, "DEBUG", True)
    change, argument = BAD[case]
    inputs = draw_packed("causal", Packing.of(9, 20), dim=32)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "cu_seqlens_q": _ints(0, 9, 20), **change()}
    with pytest.raises(ArgumentError, match=rf"^causal: {argument}: expected .*, got "):
        golden.load_op("causal")(call.pop("q"), call.pop("k"), call.pop("v"), **call)


DEVICE_CHECK = """
import torch
from generated.torch import causal
x = torch.zeros(20, 2, 32, device="cuda", dtype=torch.float16)
causal(x, x, x, cu_seqlens_q=torch.tensor({begins}, dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("begins", "rule"),
    [([1, 9, 20], "start at 0"), ([0, 21, 20], "not decrease"), ([0, 9, 19], "end at the number of tokens")],
)
def test_the_device_asserts_what_the_host_does_not_read(begins: list[int], rule: str) -> None:
    """In a process of its own, as nothing runs on a GPU after an assertion."""
    code = DEVICE_CHECK.format(begins=begins)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert f"cu_seqlens must {rule}" in result.stdout + result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("prebuilt", [False, True])
@with_variants
def test_the_host_does_not_wait_for_the_device(variant: str, prebuilt: bool) -> None:
    inputs = draw_packed(variant, MIXED)
    options = MIXED.options()
    evaluate(variant, inputs, **options)  # compiles, and loads modules
    if prebuilt:
        options["schedule"] = make_schedule(golden.load_op(variant), inputs, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(variant, inputs, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
