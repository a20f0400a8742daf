"""Calls of float8_e4m3fn on Hopper against float64 of the values that they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden, golden_jax
from generated._runtime.torch.devices import arch_of
from tests.support.cases import DEVICE

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
SHAPES = [(1, 4, 2, 300, 300, 64), (2, 2, 1, 130, 515, 128), (1, 6, 2, 1000, 1000, 128), (1, 2, 1, 515, 515, 256)]
LIMIT = 0.04
"""Limit of the relative root mean square error. Weights with 3 binary digits have independent errors of 2.6 %."""

with_frameworks = pytest.mark.parametrize("framework", ["torch", "jax"])


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if arch_of(torch.empty(0, device=DEVICE)) != "sm_90":
        pytest.skip("kernels of sm_90 alone")


def relative_error(o: Tensor, wanted: Tensor) -> float:
    return float((o.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) + 0.5


def call(framework: str, variant: str, *qkv: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """o and lse of an op in a framework, in the layout "bhsd" or packed."""
    layout: dict[str, Any] = {} if qkv[0].dim() == 3 else {"layout": "bhsd"}
    if framework == "torch":
        o, lse = golden.load_op(variant)(*qkv, **given, **layout, return_lse=True)
        return o, lse
    arrays = {name: golden_jax.array(x) for name, x in given.items()}
    found = golden_jax.load_op(variant)(*map(golden_jax.array, qkv), **arrays, **layout, return_lse=True)
    return golden_jax.tensor(found[0]), golden_jax.tensor(found[1])


@with_frameworks
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["causal", "full", "softcap"])
def test_dense(variant: str, shape: tuple[int, ...], framework: str) -> None:
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    q, k, v = (
        torch.randn(batch, h, n, dim, device=DEVICE).to(FP8)
        for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    given: dict[str, Any] = {
        "q_scale": scales(batch, heads),
        "k_scale": scales(batch, kv_heads),
        "v_scale": scales(batch, kv_heads),
    }
    reference = golden.load_reference(variant)
    o, lse = call(framework, variant, q, k, v, **given, q_offset="end")
    doubles = (
        x.double() * given[f"{name}_scale"].double()[:, :, None, None] for name, x in zip("qkv", (q, k, v), strict=True)
    )
    wanted, wanted_lse = reference(*doubles, scale=dim**-0.5, q_offset=kv_len - q_len, return_lse=True)
    assert o.dtype == torch.bfloat16
    assert relative_error(o, wanted) < LIMIT
    torch.testing.assert_close(lse.double(), wanted_lse, atol=5e-3, rtol=1e-3)


@with_frameworks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_is_dense_by_sequence(dim: int, framework: str) -> None:
    """No sequence reads the values of another, not even NaN."""
    lengths = [33, 200, 1, 700, 128]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    total, heads, kv_heads = int(cu[-1]), 4, 2
    q, k, v = (torch.randn(total, h, dim, device=DEVICE).to(FP8) for h in (heads, kv_heads, kv_heads))
    v[33:233] = torch.full_like(v[33:233].float(), float("nan")).to(FP8)
    scale = scales(len(lengths), heads)
    o, _ = call(framework, "causal", q, k, v, q_scale=scale, k_scale=0.7, v_scale=2.0, cu_seqlens_q=cu)
    reference = golden.load_reference("causal")
    for i, (begin, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        rows = slice(begin, end)
        if i == 1:
            assert o[rows].isnan().all()
            continue
        one = (x[rows].double().transpose(0, 1)[None] for x in (q, k, v))
        qd, kd, vd = one
        wanted = reference(qd * scale[i].double()[None, :, None, None], kd * 0.7, vd * 2.0, scale=dim**-0.5)
        assert relative_error(o[rows].transpose(0, 1)[None], wanted) < LIMIT


@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
def test_frameworks_give_the_same_bits(mode: str) -> None:
    """For a score with tanh, and for a negative scale, whose sign moves into q."""
    length, heads, dim = 700, 4, 128
    shape = (length, heads, dim) if mode == "packed" else (1, heads, length, dim)
    q, k, v = (torch.randn(shape, device=DEVICE).to(FP8) for _ in range(3))
    given: dict[str, Any] = {"q_scale": scales(2 if mode == "packed" else 1, heads), "k_scale": 0.7, "v_scale": 2.0}
    if mode == "packed":
        given["cu_seqlens_q"] = torch.tensor([0, 123, length], dtype=torch.int32, device=DEVICE)
    elif mode == "segmented":
        given["q_segment_ids"] = torch.arange(length, dtype=torch.int32, device=DEVICE)[None] // 300
    wanted = call("torch", "softcap", q, k, v, **given, scale=-0.1)
    for found, each in zip(call("jax", "softcap", q, k, v, **given, scale=-0.1), wanted, strict=True):
        assert torch.equal(found, each)
