"""torch's flash attention operators (of torch 2.11 to 2.14) on the ops, registered for CPU tensors, against float64.

For a GPU `tests/kernels/test_flash_attn.py` tests the way through `F.scaled_dot_product_attention`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated.integrations.variants import NotRenderedError
from tests.support.flash_reference import batched, packed

pytest.importorskip("torch.nn.attention._registry", reason="torch has no register_flash_attention_impl before 2.10")

pytestmark = pytest.mark.skipif(INTERPRET, reason="tests/kernels/test_flash_attn.py has the cases of the interpreter")

sdpa: Any = importlib.import_module("generated.integrations.sdpa")
ops: Any = importlib.import_module("generated.torch")
varlen: Any = importlib.import_module("torch.nn.attention.varlen")
aten: Any = torch.ops.aten
KEYWORDS = frozenset(inspect.signature(varlen.varlen_attn).parameters)
"""The arguments that `varlen_attn` of this torch has."""
GROUPED = {"enable_gqa": True} if "enable_gqa" in KEYWORDS else {}
"""Allows several query heads for a key head. torch 2.11 always allows that."""


@pytest.fixture
def overridden() -> Iterator[None]:
    """Register the ops as these operators for CPU tensors, which torch itself computes by other operators."""
    override = sdpa.Override("CPU")
    yield
    override.remove()


def qkv(q_len: int = 9, kv_len: int = 13) -> tuple[Tensor, ...]:
    """q, k and v `[B, H, S, D]`, as views of `[B, S, H, D]`."""
    torch.manual_seed(0)
    shapes = ((2, q_len, 4, 16), (2, kv_len, 2, 16), (2, kv_len, 2, 16))
    return tuple(torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)


def assert_gradients(o: Tensor, want: Tensor, inputs: Any) -> None:
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=2e-5)
    weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    grads = torch.autograd.grad((o.double() * weights).sum(), inputs)
    wanted = torch.autograd.grad((want * weights).sum(), inputs)
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def swapped(*inputs: Tensor) -> Iterator[Tensor]:
    return (x.transpose(1, 2) for x in inputs)


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (13, 9)], ids=str)
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}], ids=str)
def test_sdpa_operator_and_its_gradients(call: dict[str, Any], lengths: tuple[int, int]) -> None:
    inputs = qkv(*lengths)
    o, lse, begins_q, begins_k, max_q, max_k, seed, unused, debug = aten._scaled_dot_product_flash_attention(
        *inputs, **call
    )
    assert (begins_q, begins_k, max_q, max_k) == (None, None, *lengths)
    assert (seed.shape, seed.dtype, unused.shape, debug.shape) == ((2,), torch.uint64, (), (0,))
    assert o.stride() == inputs[0].stride()
    want, want_lse = batched(*swapped(*inputs), causal="is_causal" in call, scale=call.get("scale"))
    torch.testing.assert_close(lse.double(), torch.where(want_lse.isinf(), -torch.inf, want_lse), atol=2e-5, rtol=2e-5)
    assert_gradients(o, want.transpose(1, 2), inputs)


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (3, 2)], ids=str)
def test_flash_operator_with_windows(window: tuple[int, int]) -> None:
    inputs = tuple(swapped(*qkv()))
    sizes = {"window_size_left": window[0], "window_size_right": window[1]}
    o, *_ = aten._flash_attention_forward(*inputs, None, None, 9, 13, 0.0, False, False, **sizes)
    assert_gradients(o, batched(*inputs, window_size=window)[0], inputs)


Q_BEGINS, K_BEGINS = [0, 5, 5, 12], [0, 9, 10, 14]


def begins() -> tuple[Tensor, Tensor]:
    return torch.tensor(Q_BEGINS, dtype=torch.int32), torch.tensor(K_BEGINS, dtype=torch.int32)


def rows() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).requires_grad_() for shape in ((12, 4, 16), (14, 2, 16), (14, 2, 16)))


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0)], ids=str)
def test_varlen_attn(window: tuple[int, int]) -> None:
    inputs = rows()
    call: dict[str, Any] = {"window_size": window, **GROUPED, "return_aux": varlen.AuxRequest(lse=True)}
    o, lse = varlen.varlen_attn(*inputs, *begins(), 7, 9, **call)
    want, want_lse = packed(*inputs, begins=(Q_BEGINS, K_BEGINS), causal=window == (-1, 0), window_size=window)
    torch.testing.assert_close(lse.double(), torch.where(want_lse.isinf(), -torch.inf, want_lse), atol=2e-5, rtol=2e-5)
    assert_gradients(o, want, inputs)


@pytest.mark.usefixtures("overridden")
def test_varlen_attn_out() -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch has no varlen_attn_out before 2.12")
    q, k, v = (x.detach() for x in rows())
    out = torch.full_like(q, torch.nan)
    call: dict[str, Any] = {"window_size": (4, 0), **GROUPED, "return_aux": varlen.AuxRequest(lse=True)}
    _, lse = varlen.varlen_attn_out(out, q, k, v, *begins(), 7, 9, **call)
    want, want_lse = varlen.varlen_attn(q, k, v, *begins(), 7, 9, **call)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.usefixtures("overridden")
def test_varlen_attn_of_used_keys_and_of_pages() -> None:
    q, k, v = (x.detach() for x in rows())
    used = torch.tensor([4, 0, 3], dtype=torch.int32)
    keys = torch.cat([torch.arange(a, a + n) for a, n in zip(K_BEGINS, used.tolist(), strict=False)])
    kept_begins = [0, *used.cumsum(0).tolist()]
    want, _ = packed(q, k[keys], v[keys], begins=(Q_BEGINS, kept_begins), causal=True)
    got, *_ = aten._flash_attention_forward(q, k, v, *begins(), 7, 9, 0.0, True, False, seqused_k=used)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    if "seqused_k" not in KEYWORDS:
        pytest.skip("varlen_attn has no seqused_k in torch 2.11")
    call: dict[str, Any] = {"window_size": (-1, 0), **GROUPED, "seqused_k": used}
    assert torch.equal(varlen.varlen_attn(q, k, v, *begins(), 7, 9, **call), got)
    names = {argument.name for argument in aten._flash_attention_forward.default._schema.arguments}
    if "block_table" in names:  # torch 2.13
        table = torch.tensor([[2], [0], [1]], dtype=torch.int32)
        pages = torch.randn(2, 3, 8, 2, 16)
        own = [pages[:, table[s, 0], : used[s]] for s in range(3)]
        want, _ = packed(q, *torch.cat(own, 1), begins=(Q_BEGINS, kept_begins), causal=True)
        got = varlen.varlen_attn(q, *pages, begins()[0], None, 7, 8, **call, block_table=table, num_splits=1)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("overridden")
def test_dropout_is_repeated_by_the_seed_that_is_returned() -> None:
    inputs = qkv(9, 9)
    torch.manual_seed(5)
    o, lse, _, _, _, _, seed, unused, _ = aten._scaled_dot_product_flash_attention(*inputs, 0.4, True)
    torch.manual_seed(5)
    again = aten._scaled_dot_product_flash_attention(*inputs, 0.4, True)
    assert torch.equal(o, again[0])
    assert torch.equal(seed, again[6])
    assert not torch.equal(o, aten._scaled_dot_product_flash_attention(*inputs, 0.4, True)[0])
    # The op itself gives the same with this seed, and so do its gradients.
    key = (seed.tolist()[0] + seed.tolist()[1] * 0x9E3779B97F4A7C15) % 2**63
    want = ops.causal_dropout(*inputs, dropout_p=0.4, seed=key)
    assert torch.equal(o, want)
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (o, want)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    moved = torch.tensor([seed.tolist()[0], 4], dtype=torch.uint64)
    rest = (None, None, 9, 9, 0.4, True)
    do = torch.ones_like(o)
    given = [x.detach() for x in (do, *inputs, o, lse)]
    one, other = (aten._scaled_dot_product_flash_attention_backward(*given, *rest, x, unused) for x in (seed, moved))
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("packs", [False, True], ids=["dense", "packed"])
def test_parts_of_the_keys_add_up(packs: bool) -> None:
    """Context parallel computes so: o and lse of all keys, and gradients of one part after the other."""
    q, k, v = (x.detach() for x in qkv(8, 16)) if not packs else (x[:8].detach() for x in rows())
    if packs:
        k, v = torch.randn(2, 16, 2, 16)
    full = (q, k, v)
    leaves = [x.clone().requires_grad_() for x in full]
    do = torch.randn_like(q)
    if packs:
        want, _ = packed(*leaves, begins=([0, 8], [0, 16]))
    else:
        want = batched(*swapped(*leaves))[0].transpose(1, 2)
    wanted = torch.autograd.grad(want, leaves, do.double())
    axis = 0 if packs else 2
    halves = [(k.narrow(axis, i, 8), v.narrow(axis, i, 8)) for i in (0, 8)]
    if packs:
        ends = torch.tensor([0, 8], dtype=torch.int32)
        results = [sdpa.forward(q, *half, ends, ends, 8, 8, 0.0, False, False) for half in halves]
    else:
        results = [sdpa.sdpa_forward(q, *half) for half in halves]
    lse = torch.logaddexp(results[0][1], results[1][1])
    weights = [(part[1] - lse).exp()[..., None] for part in results]
    weights = [x.transpose(0, 1) for x in weights] if packs else weights
    o = sum(part[0] * weight for part, weight in zip(results, weights, strict=True))
    assert isinstance(o, Tensor)
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=2e-5)
    state = torch.zeros(2, dtype=torch.uint64)
    grads = []
    for half in halves:
        if packs:
            call: Any = (ends, ends, 8, 8, 0.0, False, state, state)
            grads.append(sdpa.backward(do, q, *half, o, lse, *call))
        else:
            grads.append(sdpa.sdpa_backward(do, q, *half, o, lse, None, None, 8, 8, 0.0, False, state, state))
    torch.testing.assert_close((grads[0][0] + grads[1][0]).double(), wanted[0].double(), atol=1e-4, rtol=1e-4)
    for place in (1, 2):
        got = torch.cat([each[place] for each in grads], axis)
        torch.testing.assert_close(got.double(), wanted[place].double(), atol=1e-4, rtol=1e-4)


def test_restore_leaves_nothing_behind() -> None:
    def computed() -> list[bool]:
        return [
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            for name in sdpa.OPERATORS
            if hasattr(aten, name)  # torch 2.11 lacks the operator that writes into an output of the caller
            for key in ("CPU", "CUDA")
        ]

    before = computed()
    sdpa.register()
    attention: Any = torch.nn.attention
    assert "codegen" in attention.list_flash_attention_impls()
    assert computed() == before
    attention.activate_flash_attention_impl("codegen")
    assert attention.current_flash_attention_impl() == "codegen"
    assert all(computed()[1::2])
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert computed() == before
    override = sdpa.Override("CPU")
    assert all(computed()[::2])
    override.remove()
    override.remove()
    assert computed() == before


@pytest.mark.usefixtures("overridden")
def test_errors_name_the_argument() -> None:
    q, k, v = (x.detach() for x in qkv(9, 9))
    rest = (None, None, 9, 9, 0.0, True, False)
    turned = tuple(x.transpose(1, 2) for x in (q, k, v))
    trained = tuple(x.clone().requires_grad_() for x in turned)
    for call, match in (
        (
            lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, True),
            "return_debug_mask: expected False",
        ),
        (lambda: aten._scaled_dot_product_flash_attention(q, k, v, scale=-1.0), "scale: expected a positive number"),
        (
            lambda: aten._flash_attention_forward(*trained, *rest, alibi_slopes=torch.ones(4)),
            "alibi_slopes: expected None where a gradient is wanted",
        ),
        (
            lambda: aten._flash_attention_forward(*turned, *rest, alibi_slopes=torch.ones(3)),
            r"alibi_slopes: expected a float tensor \[4\] or \[2, 4\]",
        ),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()
    used, packs = torch.tensor([10, 0, 0], dtype=torch.int32), [x.detach() for x in rows()]
    with pytest.raises(ArgumentError, match="kv_lengths: expected lengths from 0 to its pages' 9 keys, got 10 at 0"):
        aten._flash_attention_forward(*packs, *begins(), 7, 9, 0.0, False, False, seqused_k=used)
    with pytest.raises(NotRenderedError, match="full_dropout"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.1)
    with pytest.raises(
        ArgumentError, match="register: name: expected a name that torch does not use itself, got 'FA4'"
    ):
        sdpa.register("FA4")


def test_an_argument_that_is_newer_must_be_none() -> None:
    class Argument:
        def __init__(self, name: str) -> None:
            self.name = name

    class Operator:
        class _schema:  # noqa: N801 (torch's name)
            name = "aten::some"
            arguments = (Argument("x"), Argument("sinks"))

    call = sdpa._by_name(Operator, lambda x: x)
    assert call(1) == call(1, None) == call(x=1, sinks=None) == 1
    with pytest.raises(ArgumentError, match=r"aten\.some: sinks: expected None: this argument is newer"):
        call(1, sinks=2)


@pytest.mark.usefixtures("overridden")
def test_slopes_without_a_gradient() -> None:
    q, k, v = (x.detach() for x in swapped(*qkv()))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    o, *_ = aten._flash_attention_forward(q, k, v, None, None, 9, 13, 0.0, True, False, alibi_slopes=slopes)
    torch.testing.assert_close(o.double(), batched(q, k, v, causal=True, slopes=slopes)[0], atol=2e-5, rtol=2e-5)
