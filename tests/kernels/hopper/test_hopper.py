"""The Hopper family on a Hopper GPU: every variant that has it, forward, and gradients from its lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.archs import HOPPER_FAMILY
from generated._runtime.kernels import KERNEL_HASHES, TRAITS
from generated._runtime.torch.devices import arch_of
from tests.support.cases import DEVICE, MANIFEST, VARIANTS, Shape, assert_same, draw, evaluate, jumping
from tests.support.judge import check_results
from tests.support.packings import MIXED, Packing, draw_packed
from tests.support.replaying import never_replaying
from tests.support.segments import BY_ROW, PADDING, Call, restarting, runs, shuffled

pytestmark = pytest.mark.gpu

HAS_FAMILY = [variant for variant in VARIANTS if "hopper_fwd" in KERNEL_HASHES[variant]["dense"]]
with_family = pytest.mark.parametrize("variant", HAS_FAMILY)

SHAPES = [
    Shape(q_len=1, batch=2, dim=64),
    Shape(q_len=127, group=4, dim=64),
    Shape(q_len=300, kv_len=5, kv_heads=2, group=1, dim=128),
    Shape(q_len=5, kv_len=300, kv_heads=2, group=3, dim=256),
    # Odd and even numbers of row blocks, more blocks than the GPU has multiprocessors.
    Shape(q_len=1000, batch=2, kv_heads=2, group=3, dim=128),
    Shape(q_len=2400, kv_heads=3, group=2, dim=128),
    Shape(q_len=2300, kv_len=700, kv_heads=4, group=2, dim=64),
    # Tiles with columns beyond D, and other head dims of v than of q and k.
    Shape(q_len=400, dim=96),
    Shape(q_len=400, dim=192, dim_v=128),
    Shape(q_len=400, dim=64, dim_v=256),
]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if arch_of(torch.empty(0, device=DEVICE)) != "sm_90":
        pytest.skip("kernels of sm_90 alone")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@with_family
def test_shapes(variant: str, shape: Shape, dtype: torch.dtype) -> None:
    inputs = draw(variant, shape, dtype)
    check_results(variant, inputs, evaluate(variant, inputs, family="hopper"))


@pytest.mark.parametrize("dim", [64, 128, 256])
@with_family
def test_jumping_scores(variant: str, dim: int) -> None:
    """The reference that weights are relative to rises in blocks after the first."""
    inputs = jumping(draw(variant, Shape(q_len=1500, kv_heads=2, group=2, dim=dim), torch.bfloat16))
    check_results(variant, inputs, evaluate(variant, inputs, family="hopper"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("variant", "cap"), [("softcap", 20.0), ("gemma2_local", 50.0)])
def test_saturated_scores(variant: str, cap: float, dim: int, dtype: torch.dtype) -> None:
    """Rows whose scores are all at the lower end, and rows with both ends."""
    inputs = draw(variant, Shape(q_len=700, kv_heads=2, dim=dim), dtype)
    q, k = 16 * inputs.q.abs(), inputs.k.abs()
    q[:, :, :300] *= -1
    k[:, :, 300::3] *= -1
    inputs = replace(inputs, q=q.detach(), k=k.detach())
    with torch.no_grad():
        o, lse = inputs.call(golden.load_op(variant), return_lse=True, family="hopper")
        want, want_lse = inputs.double().call(golden.load_reference(variant), return_lse=True)
    assert o.isfinite().all()
    assert ((o.double() - want).abs() <= golden.BOUND[dtype] * want.abs().max()).all()
    # The relative error of the chip's tanh is 2**-11.
    assert ((lse.double() - want_lse).abs() <= cap * 2.0**-11).all()


@pytest.mark.parametrize("dim", [64, 128])
@with_family
def test_a_fixed_order(variant: str, dim: int) -> None:
    """With a separate dq kernel, every gradient has the same bits each time."""
    inputs = draw(variant, Shape(q_len=1100, kv_len=1000, batch=2, kv_heads=2, dim=dim), torch.bfloat16)
    # A variant with another atomic gradient cannot have a fixed order, and always has the portable dq.
    order = {} if "dense" in TRAITS[variant].atomic_modes else {"deterministic": True}
    got = evaluate(variant, inputs, family="hopper", **order)
    check_results(variant, inputs, got)
    again = evaluate(variant, inputs, family="hopper", **order)
    for name in ("dq", "dk", "dv"):
        assert_same(variant, name, again[name], got[name])


@pytest.mark.parametrize("dim", [64, 128])
@with_family
def test_in_jax(variant: str, dim: int) -> None:
    inputs = draw(variant, Shape(q_len=700, batch=2, kv_heads=2, group=3, dim=dim), torch.bfloat16)
    for deterministic in (False,) if "dense" in TRAITS[variant].atomic_modes else (False, True):
        got = evaluate(variant, inputs, framework="jax", family="hopper", deterministic=deterministic)
        check_results(variant, inputs, got)
        in_torch = evaluate(variant, inputs, family="hopper", deterministic=deterministic)
        for name in ("o", "dk", "dv"):
            assert_same(variant, name, got[name], in_torch[name])


@pytest.mark.parametrize("offset", [-200, 77, "end"], ids=str)
@with_family
def test_offsets(variant: str, offset: int | str) -> None:
    """If a row attends to nothing, o is 0 and lse is -inf, or the sink."""
    inputs = draw(variant, Shape(q_len=290, kv_len=610, kv_heads=2, dim=128), torch.bfloat16, positions=1000)
    got = evaluate(variant, inputs, family="hopper", q_offset=offset)
    check_results(variant, inputs, got, q_offset=offset)


HAS_LONG_TILE = [variant for variant in HAS_FAMILY if TRAITS[variant].suits_long_tile]


@pytest.mark.parametrize("variant", HAS_LONG_TILE)
def test_long_sequences_of_narrow_columns(variant: str) -> None:
    """Three warpgroups, with the last row inside of a warpgroup's rows."""
    shape = Shape(q_len=700, kv_len=HOPPER_FAMILY.long_forward_from + 300, kv_heads=2, group=2, dim=64)
    inputs = draw(variant, shape, torch.bfloat16)
    got = evaluate(variant, inputs, family="hopper", q_offset="end")
    check_results(variant, inputs, got, q_offset="end")


@with_family
def test_layouts(variant: str) -> None:
    """Strides of a view of a larger tensor, of rows with all heads together, and of one head expanded to all."""
    inputs = draw(variant, Shape(q_len=333, batch=2, kv_heads=2, group=2, dim=128), torch.bfloat16)
    op = golden.load_op(variant)
    with torch.no_grad():
        want = inputs.call(op, family="hopper")
        wide = inputs.q.new_zeros(2, 333, 4, 3 * 128)
        wide[..., 128:256] = inputs.q.transpose(1, 2)
        q = wide[..., 128:256].transpose(1, 2)
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.k, inputs.v))
        got = op(q, k, v, **inputs.tensors, **inputs.scalars, family="hopper")
        assert_same(variant, "o", got, want)
        one = inputs.k[:, :1].expand(-1, 2, -1, -1), inputs.v[:, :1].expand(-1, 2, -1, -1)
        same = tuple(x.contiguous() for x in one)
        got = op(q, *one, **inputs.tensors, **inputs.scalars, family="hopper")
        assert_same(variant, "o", got, op(q, *same, **inputs.tensors, **inputs.scalars, family="hopper"))


@with_family
def test_replays_and_graphs(variant: str) -> None:
    """A replayed call, and a graph of it, give the bits of a computed call: they also pass the kernel its buffers."""
    op, shape = golden.load_op(variant), Shape(q_len=520, batch=2, kv_heads=2, dim=128)
    with torch.no_grad():
        for _ in range(4):
            inputs = draw(variant, shape, torch.bfloat16)
            got = inputs.call(op, family="hopper")
            with never_replaying():
                assert_same(variant, "o", got, inputs.call(op, family="hopper"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = inputs.call(op, family="hopper")
        graph.replay()
        assert_same(variant, "o", captured, got)


@with_family
def test_replayed_gradients(variant: str) -> None:
    """The buffer in which dq is summed starts from zeros each time."""
    op, shape = golden.load_op(variant), Shape(q_len=520, batch=2, kv_heads=2, dim=64)
    for _ in range(4):
        inputs = draw(variant, shape, torch.bfloat16)
        check_results(variant, inputs, golden.evaluate(op, inputs, family="hopper"))


PACKINGS = [
    Packing.of(1000),
    Packing.of(1, 130, 130, 400, 1700, 1828, 3000),
    Packing(q=(0, 130, 330, 331, 900), k=(0, 40, 700, 1400, 1420)),
    MIXED,
    # More sequences than multiprocessors, most of them short.
    Packing.of(*range(7, 3000, 11), 5000),
]


@pytest.mark.parametrize("offset", [0, "end"], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: f"{packing.sequences}_of_{packing.q[-1]}")
@with_family
def test_packed(variant: str, packing: Packing, offset: int | str) -> None:
    of_pairs = [name for name, x in MANIFEST[variant]["tensors"].items() if {"b", "q_idx", "kv_idx"} <= {*x["dims"]}]
    if of_pairs and packing.sequences > 200:
        pytest.skip(f"{of_pairs[0]}: a value per sequence, head and pair of 5000 positions would take 164 GB")
    inputs = draw_packed(variant, packing, torch.bfloat16, kv_heads=2, group=3, dim=128)
    options: dict[str, Any] = {"q_offset": offset, **packing.options()}
    check_results(variant, inputs, evaluate(variant, inputs, family="hopper", **options), **options)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (96, 64), (192, 128), (64, 256)])
@with_family
def test_packed_head_dims(variant: str, dim: int, dim_v: int) -> None:
    packing = PACKINGS[1]
    inputs = draw_packed(variant, packing, torch.float16, dim=dim, dim_v=dim_v)
    options: dict[str, Any] = packing.options()
    check_results(variant, inputs, evaluate(variant, inputs, family="hopper", **options), **options)


@with_family
def test_packed_in_jax(variant: str) -> None:
    packing = PACKINGS[2]
    inputs = draw_packed(variant, packing, torch.bfloat16, kv_heads=2, group=2, dim=128)
    options: dict[str, Any] = packing.options()
    got = evaluate(variant, inputs, framework="jax", family="hopper", **options)
    check_results(variant, inputs, got, **options)
    assert_same(variant, "o", got["o"], evaluate(variant, inputs, family="hopper", **options)["o"])


def test_packed_gradients_of_the_portable_dq() -> None:
    """With a tile for dq, dq has its own kernel: then all bits are the same each time."""
    packing = PACKINGS[1]
    inputs = draw_packed("causal", packing, torch.bfloat16, kv_heads=2, group=2, dim=128)
    own = {"dq": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}}
    options: dict[str, Any] = packing.options()
    got = [evaluate("causal", inputs, family="hopper", config=own, **options) for _ in range(2)]
    check_results("causal", inputs, got[0], **options)
    for name, x in got[0].items():
        assert_same("causal", name, x, got[1][name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@with_family
def test_no_sequence_sees_another(variant: str, value: float) -> None:
    packing = Packing.of(70, 1333, 1500)
    inputs = draw_packed(variant, packing, torch.bfloat16, dim=128)
    op = golden.load_op(variant)
    with torch.no_grad():
        want = inputs.call(op, family="hopper", return_lse=True, **packing.options())
        for x in (inputs.q, inputs.k, inputs.v):
            x[:70], x[1333:] = value, value
        got = inputs.call(op, family="hopper", return_lse=True, **packing.options())
    assert_same(variant, "o", got[0][70:1333], want[0][70:1333])
    assert_same(variant, "lse", got[1][:, 70:1333], want[1][:, 70:1333])


def check_replays_and_graphs(
    variant: str, drawn: Callable[[], Inputs], options: dict[str, Any], *, scheduled: bool
) -> None:
    """Replayed calls, and a graph of one, give the bits of a computed call: the work counter starts at 0 each time.

    `scheduled`: the graph is of a call with a schedule; without one the host waits for the sizes of some masks' tables.
    """
    op = golden.load_op(variant)
    with torch.no_grad():
        for _ in range(4):
            inputs = drawn()
            got = inputs.call(op, family="hopper", **options)
            with never_replaying():
                assert_same(variant, "o", got, inputs.call(op, family="hopper", **options))
        own = {"schedule": make_schedule(op, inputs, family="hopper", **options)} if scheduled else {}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = inputs.call(op, family="hopper", **options, **own)
        for _ in range(2):
            captured.zero_()
            graph.replay()
            assert_same(variant, "o", captured, got)


@with_family
def test_packed_replays_and_graphs(variant: str) -> None:
    packing = PACKINGS[1]
    check_replays_and_graphs(
        variant,
        lambda: draw_packed(variant, packing, torch.bfloat16, kv_heads=4, dim=128),
        packing.options(),
        scheduled=hasattr(golden.load_op(variant), "schedule"),
    )


LONG, MIXED_IDS = runs((3, 700), (1, 20), (7, 1100)), runs((0, 300), (PADDING, 250), (0, 70), (5, 1200))
SEGMENTED = {
    "documents": Call(
        shape=Shape(q_len=1820, batch=2, kv_heads=2, group=3, dim=128), tokens={"q_segment_ids": [LONG, MIXED_IDS]}
    ),
    "restarting positions": Call(
        shape=Shape(q_len=1820, batch=2, kv_heads=2, dim=64),
        tokens={"q_segment_ids": [LONG, MIXED_IDS], "q_positions": [restarting(LONG), restarting(MIXED_IDS)]},
    ),
    "other keys": Call(
        shape=Shape(q_len=620, kv_len=1820, kv_heads=2, dim=128),
        tokens={"q_segment_ids": [runs((0, 200), (PADDING, 20), (5, 400))], "kv_segment_ids": [MIXED_IDS]},
        q_offset="end",
    ),
    "fewer keys": Call(
        shape=Shape(q_len=300, kv_len=1000, batch=4, dim=64), kv_lengths=(0, 1, 517, 1000), q_offset="end"
    ),
    "wide tiles": Call(
        shape=Shape(q_len=1820, kv_heads=2, dim=256),
        tokens={"q_segment_ids": [LONG], "q_positions": [restarting(LONG)]},
    ),
    "padded columns": Call(shape=Shape(q_len=1820, dim=192, dim_v=128), tokens={"q_segment_ids": [MIXED_IDS]}),
    "positions in any order": Call(
        shape=Shape(q_len=700, dim=128),
        tokens={"q_positions": [shuffled(700, 0)], "kv_positions": [shuffled(700, 1)]},
    ),
}


@pytest.mark.parametrize("name", SEGMENTED)
@with_family
def test_segmented(variant: str, name: str) -> None:
    call = SEGMENTED[name]
    inputs, options = call.inputs(variant, torch.bfloat16), call.options()
    got = evaluate(variant, inputs, family="hopper", **options)
    if variant in BY_ROW and name == "positions in any order":
        assert got["o"].isnan().all()
        assert got["dq"].isnan().all()
    else:
        check_results(variant, inputs, got, **options)


@pytest.mark.parametrize("name", ["documents", "restarting positions"])
@with_family
def test_segmented_in_jax(variant: str, name: str) -> None:
    call = SEGMENTED[name]
    inputs, options = call.inputs(variant, torch.bfloat16), call.options()
    got = evaluate(variant, inputs, framework="jax", family="hopper", **options)
    check_results(variant, inputs, got, **options)
    assert_same(variant, "o", got["o"], evaluate(variant, inputs, family="hopper", **options)["o"])


@pytest.mark.parametrize("name", ["documents", "restarting positions"])
@with_family
def test_segmented_replays_and_graphs(variant: str, name: str) -> None:
    call = SEGMENTED[name]
    drawn = partial(call.inputs, variant, torch.bfloat16)
    check_replays_and_graphs(variant, drawn, call.options(), scheduled=True)


def test_equal_bits_on_any_number_of_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw("causal", Shape(q_len=1500, kv_heads=2, dim=128), torch.bfloat16)
    op = golden.load_op("causal")
    with torch.no_grad():
        want = inputs.call(op, family="hopper")
        for count in (1, 7, 10_000):
            monkeypatch.setattr("generated._runtime.torch.backend.multiprocessors", lambda _, count=count: count)
            with never_replaying():
                assert_same("causal", "o", inputs.call(op, family="hopper"), want)
