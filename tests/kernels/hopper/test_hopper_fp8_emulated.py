"""Calls in float8_e4m3fn without a GPU; `test_hopper_emulated` tests calls in 16 bits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from emulator import Kernel, Timing
from tests.kernels.hopper.test_hopper_emulated import PROGRAMS, emulated_kernel, with_timings

PACKAGE = "generated"
FP8 = torch.float8_e4m3fn
OWN: dict[str, dict[str, Any]] = {"causal": {}, "softcap": {}, "gpt_oss": {"sink": torch.tensor([0.5, -1.0, 3.0, 9.0])}}

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="forward", dtype="float8_e4m3fn", framework="torch"),
]


def emulate(monkeypatch: pytest.MonkeyPatch, variant: str, timing: Timing, mode: str = "") -> Kernel:
    """Calls of `variant` launch the returned kernel, as on an sm_90."""
    module = importlib.import_module(f"{PACKAGE}.{variant}.{mode}".rstrip(".") + ".hopper_fwd_fp8")
    name = f"{variant}_{mode}".rstrip("_") + "_hopper_fwd_fp8"
    assert module.__file__ is not None
    kernel = emulated_kernel(Path(module.__file__), name, timing, lambda sources: sources)
    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.backend.multiprocessors", lambda _: PROGRAMS)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.devices.arch_of", lambda _: "sm_90")
    return kernel


def check(o: Tensor, lse: Tensor, wanted: Tensor, wanted_lse: Tensor) -> None:
    """Compare o and lse. Weights with 3 binary digits have independent errors of 2.6 % (uniform, at most 1/16)."""
    assert o.dtype == torch.bfloat16
    error = (o.double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert error < 0.04
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-3, rtol=1e-4)


@with_timings
@pytest.mark.parametrize("variant", OWN)
def test_dense_call_agrees_with_reference(monkeypatch: pytest.MonkeyPatch, variant: str, timing: Timing) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, dim = 1, 4, 2, 64
    q, k, v = (torch.randn(batch, h, n, dim) for h, n in ((heads, 150), (kv_heads, 300), (kv_heads, 300)))
    q, k, v = (x.to(FP8) for x in (q, k, v))
    scales: dict[str, Any] = {
        "q_scale": torch.rand(heads) + 0.5,
        "k_scale": 0.7,
        "v_scale": torch.rand(batch, kv_heads) + 0.5,
    }
    op, reference = golden.load_op(variant, PACKAGE), golden.load_reference(variant, package=PACKAGE)
    kernel = emulate(monkeypatch, variant, timing)
    o, lse = op(q, k, v, **scales, **OWN[variant], q_offset="end", return_lse=True)
    assert kernel.launches == 1
    q, k, v = q.double() * scales["q_scale"][:, None, None], k.double() * 0.7, v.double()
    v = v * scales["v_scale"][:, :, None, None]
    own = {name: x.double() for name, x in OWN[variant].items()}
    check(o, lse, *reference(q, k, v, **own, scale=dim**-0.5, q_offset=150, return_lse=True))


@with_timings
def test_packed_call_agrees_with_dense_ones(monkeypatch: pytest.MonkeyPatch, timing: Timing) -> None:
    torch.manual_seed(0)
    lengths = [33, 200, 1, 150]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total, heads, kv_heads, dim = int(cu[-1]), 2, 1, 64
    q, k, v = (torch.randn(total, h, dim).to(FP8) for h in (heads, kv_heads, kv_heads))
    scale = torch.rand(len(lengths), heads) + 0.5
    op, reference = golden.load_op("causal", PACKAGE), golden.load_reference("causal", package=PACKAGE)
    kernel = emulate(monkeypatch, "causal", timing, "packed")
    o, lse = op(q, k, v, q_scale=scale, k_scale=0.7, v_scale=2.0, cu_seqlens_q=cu, return_lse=True)
    assert kernel.launches == 1
    for n, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        rows = [x[start:end].double().transpose(0, 1)[None] for x in (q, k, v)]
        rows = [rows[0] * scale[n][:, None, None], rows[1] * 0.7, rows[2] * 2.0]
        wanted, wanted_lse = reference(*rows, scale=dim**-0.5, return_lse=True)
        check(o[start:end].transpose(0, 1)[None], lse[None, :, start:end], wanted, wanted_lse)
