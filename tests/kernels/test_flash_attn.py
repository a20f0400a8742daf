"""flash_attn's functions and torch's flash attention operators on the kernels: tests/integrations has all their cases.

`test_sdpa_on_a_gpu` and the tests after it need torch 2.10 or newer and a GPU, because they call torch's own functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import DEVICE
from tests.support.flash_reference import batched, packed

sdpa: Any = importlib.import_module("generated.integrations.sdpa")
fa: Any = importlib.import_module("generated.integrations.flash_attn")
functional: Any = torch.nn.functional
aten: Any = torch.ops.aten

TOLERANCE: Any = {"atol": 2e-5, "rtol": 2e-5}
GRADIENTS: Any = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def overridden() -> Iterator[None]:
    override = sdpa.Override("CUDA" if DEVICE == "cuda" else "CPU")
    yield
    override.remove()


def qkv(q_len: int, kv_len: int) -> list[Tensor]:
    """q, k and v `[B, S, H, D]`."""
    shapes = ((2, q_len, 4, 16), (2, kv_len, 2, 16), (2, kv_len, 2, 16))
    return [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]


def on_cpu(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in inputs]


def assert_same(o: Tensor, inputs: Any, want: Tensor, leaves: Any) -> None:
    torch.testing.assert_close(o.double().cpu(), want, **TOLERANCE)
    do = torch.randn(o.shape)
    grads = torch.autograd.grad(o, inputs, do.to(o))
    for x, y in zip(grads, torch.autograd.grad(want, leaves, do.double()), strict=True):
        torch.testing.assert_close(x.double().cpu(), y, **GRADIENTS)


@pytest.mark.parametrize("q_len", [20, 37])
def test_dense_window_and_softcap(q_len: int) -> None:
    inputs = qkv(q_len, 29)
    call: dict[str, Any] = {"causal": True, "window_size": (9, 0), "softcap": 2.0}
    leaves = on_cpu(*inputs)
    assert_same(fa.flash_attn_func(*inputs, **call), inputs, batched(*leaves, **call)[0], leaves)


def test_packed_causal_sequences() -> None:
    inputs = [x[0].detach().requires_grad_() for x in qkv(30, 33)]
    begins = [0, 7, 7, 30], [0, 12, 13, 33]
    cu_seqlens = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in begins]
    leaves = on_cpu(*inputs)
    want, _ = packed(*leaves, begins=begins, causal=True)
    assert_same(fa.flash_attn_varlen_func(*inputs, *cu_seqlens, 23, 20, causal=True), inputs, want, leaves)


@pytest.mark.parametrize("left_padding", [False, True])
def test_cache_with_new_keys(left_padding: bool) -> None:
    q, k, v = (x.detach() for x in qkv(2, 2))
    caches, lengths, first = torch.randn(2, 2, 40, 2, 16, device=DEVICE), [5, 33], [0, 0]
    rows = [caches[:, b].cpu().clone() for b in range(2)]
    given: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, device=DEVICE, dtype=torch.int32)}
    if left_padding:
        first = [3, 17]
        given["cache_leftpad"] = torch.tensor(first, device=DEVICE, dtype=torch.int32)
    got = fa.flash_attn_with_kvcache(q, *caches, k, v, **given, causal=True)
    for b, length in enumerate(lengths):
        rows[b][:, length : length + 2] = torch.stack([k[b], v[b]]).cpu()
        want, _ = batched(q[b : b + 1].cpu(), *(x[None, first[b] : length + 2] for x in rows[b]), causal=True)
        torch.testing.assert_close(got[b].cpu().double(), want[0], **TOLERANCE)


@pytest.mark.usefixtures("overridden")
def test_sdpa_operators_and_dropout() -> None:
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in qkv(21, 21)]
    leaves = on_cpu(*inputs)
    want = batched(*(x.transpose(1, 2) for x in leaves), causal=True)[0].transpose(1, 2)
    assert_same(aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)[0], inputs, want, leaves)
    torch.manual_seed(1)
    o, *_, seed, _, _ = aten._scaled_dot_product_flash_attention(*inputs, 0.3, True)
    own = importlib.import_module("generated.torch").causal_dropout(*inputs, dropout_p=0.3, seed=sdpa._seed_of(seed))
    assert torch.equal(o, own)
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (o, own)), strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0)


def test_backward_of_half_the_keys_reads_the_lse_of_all() -> None:
    q, k, v = (x.transpose(1, 2).detach() for x in qkv(16, 32))
    leaves = on_cpu(q, k, v)
    want = batched(*(x.transpose(1, 2) for x in leaves))[0].transpose(1, 2)
    do = torch.randn(want.shape)
    wanted = torch.autograd.grad(want, leaves, do.double())
    o, lse, *_ = sdpa.sdpa_forward(q, k, v)
    state = torch.zeros(2, dtype=torch.uint64)
    total = torch.zeros_like(q)
    for i in (0, 16):
        half = k.narrow(2, i, 16), v.narrow(2, i, 16)
        given = (do.to(q), q, *half, o, lse, None, None, 16, 16, 0.0, False, state, state)
        dq, dk, dv = sdpa.sdpa_backward(*given)
        total += dq
        for x, y in ((dk, wanted[1]), (dv, wanted[2])):
            torch.testing.assert_close(x.double().cpu(), y.narrow(2, i, 16), **GRADIENTS)
    torch.testing.assert_close(total.double().cpu(), wanted[0], **GRADIENTS)


# ---------------------------------------------------------------------------------------------- through torch, on a GPU


@pytest.fixture
def activated() -> Iterator[None]:
    attention: Any = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("torch before 2.10 has no register_flash_attention_impl")
    sdpa.register()
    attention.activate_flash_attention_impl("codegen")
    yield
    attention.restore_flash_attention_impl()


def flash_only() -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def launched(run: Any) -> str:
    """The names of the kernels of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch chooses its flash kernels on a GPU alone")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_sdpa_on_a_gpu(is_causal: bool, compiles: bool) -> None:
    inputs = [torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    leaves = on_cpu(*inputs)
    want = batched(*(x.transpose(1, 2) for x in leaves), causal=is_causal)[0].transpose(1, 2)
    attend = functional.scaled_dot_product_attention
    attend = torch.compile(attend) if compiles else attend
    do = torch.randn_like(inputs[0])
    with flash_only():
        o = attend(*inputs, is_causal=is_causal)
        grads = torch.autograd.grad(o, inputs, do)
        names = launched(lambda: attend(*inputs, is_causal=is_causal))
    assert ("causal" if is_causal else "full") in names
    assert "flash_fwd" not in names
    torch.testing.assert_close(o.double().cpu(), want, atol=2e-2, rtol=2e-2)
    for x, y in zip(grads, torch.autograd.grad(want, leaves, do.double().cpu()), strict=True):
        torch.testing.assert_close(x.double().cpu(), y, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch chooses its flash kernels on a GPU alone")
def test_dropout_follows_the_generator_of_a_gpu() -> None:
    inputs = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def attend() -> Any:
        with flash_only():
            return functional.scaled_dot_product_attention(*inputs, dropout_p=0.2, is_causal=True)

    torch.cuda.manual_seed(7)
    first, second = attend(), attend()
    torch.cuda.manual_seed(7)
    assert torch.equal(attend(), first)
    assert torch.equal(attend(), second)
    assert not torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn computes on a GPU alone")
def test_varlen_attn_on_a_gpu() -> None:
    shapes = ((700, 8, 64), (700, 8, 64), (700, 8, 64))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    begins = [0, 100, 101, 700]
    cu_seqlens = torch.tensor(begins, dtype=torch.int32, device="cuda")
    leaves = on_cpu(*inputs)
    want, _ = packed(*leaves, begins=(begins, begins), causal=True)
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    o = varlen.varlen_attn(*inputs, cu_seqlens, cu_seqlens, 599, 599, window_size=(-1, 0))
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, inputs, do)
    torch.testing.assert_close(o.double().cpu(), want, atol=2e-2, rtol=2e-2)
    for x, y in zip(grads, torch.autograd.grad(want, leaves, do.double().cpu()), strict=True):
        torch.testing.assert_close(x.double().cpu(), y, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="what torch's own kernels give is seen on a GPU alone")
def test_restore_brings_torchs_own_kernels_back() -> None:
    attention: Any = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("torch before 2.10 has no register_flash_attention_impl")
    inputs = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def attend() -> Any:
        with flash_only():
            return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    want, names = attend(), launched(attend)
    sdpa.register()
    attention.activate_flash_attention_impl("codegen")
    assert launched(attend) != names
    attention.restore_flash_attention_impl()
    assert launched(attend) == names
    assert torch.equal(attend(), want)
