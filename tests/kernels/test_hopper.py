"""Hopper's own family on such a GPU: every variant that has it, forward, and gradients from its lse."""

from __future__ import annotations

import pytest
import torch

from bench import golden
from generated._runtime.kernels import ATOMIC, KERNEL_HASHES
from generated._runtime.torch_support import arch_of

from .cases import DEVICE, VARIANTS, Shape, assert_same, draw, evaluate
from .judge import check_results
from .replaying import never_replaying

pytestmark = pytest.mark.gpu

HAS_FAMILY = [variant for variant in VARIANTS if "hopper_fwd" in KERNEL_HASHES[variant]["dense"]]
with_family = pytest.mark.parametrize("variant", HAS_FAMILY)

SHAPES = [
    Shape(q_len=1, batch=2, dim=64),
    Shape(q_len=127, group=4, dim=64),
    Shape(q_len=300, kv_len=5, kv_heads=2, group=1, dim=128),
    Shape(q_len=5, kv_len=300, kv_heads=2, group=3, dim=256),
    # Odd and even numbers of blocks of rows, more than there are multiprocessors.
    Shape(q_len=1000, batch=2, kv_heads=2, group=3, dim=128),
    Shape(q_len=2400, kv_heads=3, group=2, dim=128),
    Shape(q_len=2300, kv_len=700, kv_heads=4, group=2, dim=64),
    # Columns beyond D, and others of v than of q and k.
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


@pytest.mark.parametrize("dim", [64, 128])
@with_family
def test_a_fixed_order(variant: str, dim: int) -> None:
    """Behind a dq of its own every gradient has the same bits each time."""
    inputs = draw(variant, Shape(q_len=1100, kv_len=1000, batch=2, kv_heads=2, dim=dim), torch.bfloat16)
    # What has an atomic gradient besides takes no order, and has a portable dq in any case.
    order = {} if variant in ATOMIC else {"deterministic": True}
    got = evaluate(variant, inputs, family="hopper", **order)
    check_results(variant, inputs, got)
    again = evaluate(variant, inputs, family="hopper", **order)
    for name in ("dq", "dk", "dv"):
        assert_same(variant, name, again[name], got[name])


@pytest.mark.parametrize("dim", [64, 128])
@with_family
def test_in_jax(variant: str, dim: int) -> None:
    inputs = draw(variant, Shape(q_len=700, batch=2, kv_heads=2, group=3, dim=dim), torch.bfloat16)
    for deterministic in (False,) if variant in ATOMIC else (False, True):
        got = evaluate(variant, inputs, framework="jax", family="hopper", deterministic=deterministic)
        check_results(variant, inputs, got)
    in_torch = evaluate(variant, inputs, family="hopper")
    for name in ("o", "dk", "dv"):
        assert_same(variant, name, got[name], in_torch[name])


@pytest.mark.parametrize("offset", [-200, 77, "end"], ids=str)
@with_family
def test_offsets(variant: str, offset: int | str) -> None:
    """Where rows attend to nothing, o is 0 and lse is -inf, or the sink."""
    inputs = draw(variant, Shape(q_len=290, kv_len=610, kv_heads=2, dim=128), torch.bfloat16, positions=1000)
    got = evaluate(variant, inputs, family="hopper", q_offset=offset)
    check_results(variant, inputs, got, q_offset=offset)


@with_family
def test_layouts(variant: str) -> None:
    """Strides that describe a view of a larger tensor, rows of all heads together, and one head for all."""
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
    """A replayed call, and a graph of it, give the bits of a computed one: they give the kernel its memory."""
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
    """What adds up dq starts from zeros each time."""
    op, shape = golden.load_op(variant), Shape(q_len=520, batch=2, kv_heads=2, dim=64)
    for _ in range(4):
        inputs = draw(variant, shape, torch.bfloat16)
        check_results(variant, inputs, golden.evaluate(op, inputs, family="hopper"))


def test_equal_bits_on_any_number_of_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw("causal", Shape(q_len=1500, kv_heads=2, dim=128), torch.bfloat16)
    op = golden.load_op("causal")
    with torch.no_grad():
        want = inputs.call(op, family="hopper")
        for count in (1, 7, 10_000):
            monkeypatch.setattr("generated.causal.torch_launch.multiprocessors", lambda _, count=count: count)
            with never_replaying():
                assert_same("causal", "o", inputs.call(op, family="hopper"), want)
