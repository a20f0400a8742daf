"""The functions of flash_attn 2.8 compared with their documentation, in float64; the package is not needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated._runtime.torch.philox import dropout_words
from generated.integrations import flash_attn_padding
from generated.integrations.entries import Attention, entry
from generated.integrations.variants import NotRenderedError
from tests.support.flash_reference import batched, drawn, packed, qkv
from tests.support.rendering import importable

fa: Any = importlib.import_module("generated.integrations.flash_attn")
"""Any, because the functions return one tensor or several, depending on their arguments."""

pytestmark = pytest.mark.skipif(INTERPRET, reason="tests/kernels/test_flash_attn.py has the cases of the interpreter")

KINDS = [
    Attention(after=0, alibi="b, h"),
    Attention(alibi="h"),
    Attention(after=0, before=5, cap=2.0, alibi="h"),
    Attention(after=3, before=5, cap=2.0, alibi="b, h"),
    Attention(dropout=True),
]
"""Kinds of attention for which the repository's own package has no variant."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`flash_attn` of a package rendered from the entries that errors propose."""
    spec = "variants:\n" + "".join(entry(kind).removeprefix("variants:\n") + "\n" for kind in KINDS)
    with importable(tmp_path_factory.mktemp("package"), "flash_variants", spec) as folder:
        yield importlib.import_module(f"{folder.name}.integrations.flash_attn")


def test_an_entry_for_both_sides_does_not_take_the_name_of_the_causal_one() -> None:
    assert "  alibi_both_sides:\n" in entry(Attention(alibi="h"))
    assert "  causal_alibi:\n" in entry(Attention(after=0, alibi="h"))


def assert_same(got: Any, want: Any, inputs: Any) -> None:
    """Compare o, lse and the gradients of o, float32 with float64."""
    (o, lse), (want_o, want_lse) = got, want
    torch.testing.assert_close(o.double(), want_o, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)
    weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    grads = torch.autograd.grad((o.double() * weights).sum(), inputs)
    wanted = torch.autograd.grad((want_o * weights).sum(), inputs)
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [0.4, 0.3, 0.2, 0.1]])
CALLS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (4, 7)},
    {"window_size": (4, 2)},
    {"window_size": (-1, 2)},
    {"window_size": (3, -1), "softmax_scale": 0.4},
    {"causal": True, "softcap": 20.0},
    {"causal": True, "window_size": (5, 0), "softcap": 2.0},
    {"causal": True, "alibi_slopes": SLOPES[0]},
]


def spoken(call: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the reference."""
    names = {"alibi_slopes": "slopes", "softmax_scale": "scale"}
    return {names.get(name, name): x for name, x in call.items()}


# ---------------------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("rows", [9, 13, 17])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_dense_calls_align_the_last_query_with_the_last_key(call: dict[str, Any], rows: int) -> None:
    inputs = qkv(rows)
    o, lse, nothing = fa.flash_attn_func(*inputs, **call, return_attn_probs=True)
    assert nothing.shape == (0,)
    torch.testing.assert_close(fa.flash_attn_func(*inputs, **call), o, atol=0, rtol=0)
    assert_same((o, lse), batched(*inputs, **spoken(call)), inputs)


@pytest.mark.parametrize(
    "call",
    [
        {"causal": True, "alibi_slopes": SLOPES},
        {"alibi_slopes": SLOPES[0]},
        {"causal": True, "window_size": (5, 5), "softcap": 2.0, "alibi_slopes": SLOPES[0]},
        {"window_size": (5, 3), "softcap": 2.0, "alibi_slopes": SLOPES},
    ],
    ids=["rows", "both sides", "causal stack", "window stack"],
)
def test_entries_of_errors_serve_slopes_and_stacks(call: dict[str, Any], own: Any) -> None:
    inputs = qkv()
    with pytest.raises(NotRenderedError, match="slope:"):
        fa.flash_attn_func(*inputs, **call)
    o, lse, _ = own.flash_attn_func(*inputs, **call, return_attn_probs=True)
    assert_same((o, lse), batched(*inputs, **spoken(call)), inputs)


def test_stacked_inputs_get_one_gradient() -> None:
    stack = drawn(2, 9, 3, 4, 16)
    o, lse, _ = fa.flash_attn_qkvpacked_func(stack, causal=True, return_attn_probs=True)
    assert_same((o, lse), batched(*stack.unbind(2), causal=True), [stack])
    q, kv = drawn(2, 9, 4, 16), drawn(2, 13, 2, 2, 16)
    o, lse, _ = fa.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    assert_same((o, lse), batched(q, *kv.unbind(2), causal=True), [q, kv])


def test_positions_of_arguments_are_the_packages() -> None:
    inputs = qkv()
    got = fa.flash_attn_func(*inputs, 0.0, 0.3, True, (5, 5), 2.0, None, True, False)
    want, _ = batched(*inputs, scale=0.3, causal=True, window_size=(5, 5), softcap=2.0)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_slopes_have_no_gradient() -> None:
    slopes = SLOPES[0].clone().requires_grad_()
    fa.flash_attn_func(*qkv(), causal=True, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None


def test_dropout_is_of_the_seed_that_torch_draws(own: Any) -> None:
    kinds: tuple[tuple[dict[str, Any], Any], ...] = ({"causal": True}, fa), ({}, own)
    for call, functions in kinds:
        inputs = qkv()
        torch.manual_seed(3)
        o = functions.flash_attn_func(*inputs, 0.3, **call)
        torch.manual_seed(3)
        assert torch.equal(functions.flash_attn_func(*inputs, 0.3, **call), o)
        assert not torch.equal(functions.flash_attn_func(*inputs, 0.3, **call), o)
        torch.manual_seed(3)
        seed = int(torch.randint(2**63 - 1, ()).item())
        words = dropout_words(seed, (2, 4, 9, 13), torch.device("cpu"))
        kept = (words >= round(0.3 * 2**32)).double()
        parts = [batched(*(x[b : b + 1] for x in inputs), **call, kept=kept[b], dropout_p=0.3)[0] for b in (0, 1)]
        torch.testing.assert_close(o.double(), torch.cat(parts), atol=2e-5, rtol=2e-5)


# --------------------------------------------------------------------------------------------------------------- packed

Q_BEGINS, K_BEGINS = [0, 5, 5, 12], [0, 9, 10, 14]
"""Three sequences: fewer queries than keys, no query, and more queries than keys."""


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_packed_calls_align_each_sequence(call: dict[str, Any]) -> None:
    inputs = tuple(x[0].detach().requires_grad_() for x in qkv(12, 14))
    begins = torch.tensor(Q_BEGINS, dtype=torch.int32), torch.tensor(K_BEGINS, dtype=torch.int32)
    o, lse, _ = fa.flash_attn_varlen_func(*inputs, *begins, 7, 9, **call, return_attn_probs=True)
    assert_same((o, lse), packed(*inputs, begins=(Q_BEGINS, K_BEGINS), **spoken(call)), inputs)


def test_packed_slopes_of_each_sequence(own: Any) -> None:
    inputs = tuple(x[0].detach().requires_grad_() for x in qkv(12, 14))
    slopes = torch.rand(3, 4)
    begins = torch.tensor(Q_BEGINS, dtype=torch.int32), torch.tensor(K_BEGINS, dtype=torch.int32)
    call = {"causal": True, "alibi_slopes": slopes}
    o, lse, _ = own.flash_attn_varlen_func(*inputs, *begins, 7, 9, **call, return_attn_probs=True)
    assert_same((o, lse), packed(*inputs, begins=(Q_BEGINS, K_BEGINS), causal=True, slopes=slopes), inputs)


def test_packed_stacks() -> None:
    stack, begins = drawn(12, 3, 4, 16), torch.tensor(Q_BEGINS, dtype=torch.int32)
    o, lse, _ = fa.flash_attn_varlen_qkvpacked_func(stack, begins, 7, causal=True, return_attn_probs=True)
    assert_same((o, lse), packed(*stack.unbind(1), begins=(Q_BEGINS, Q_BEGINS), causal=True), [stack])
    q, kv, keys = drawn(12, 4, 16), drawn(14, 2, 2, 16), torch.tensor(K_BEGINS, dtype=torch.int32)
    o, lse, _ = fa.flash_attn_varlen_kvpacked_func(q, kv, begins, keys, 7, 9, causal=True, return_attn_probs=True)
    assert_same((o, lse), packed(q, *kv.unbind(1), begins=(Q_BEGINS, K_BEGINS), causal=True), [q, kv])


def test_packed_queries_on_pages() -> None:
    q, pages = drawn(12, 4, 16).detach(), torch.randn(2, 7, 4, 2, 16)
    table = torch.tensor([[3, 1, 5], [2, 0, 0], [4, 6, 0]], dtype=torch.int32)
    keys = torch.cat([pages[:, table[s]].flatten(1, 2)[:, : K_BEGINS[s + 1] - K_BEGINS[s]] for s in range(3)], 1)
    begins = torch.tensor(Q_BEGINS, dtype=torch.int32), torch.tensor(K_BEGINS, dtype=torch.int32)
    call: dict[str, Any] = {"causal": True, "window_size": (3, 0)}
    got = fa.flash_attn_varlen_func(q, *pages, *begins, 7, 9, **call, return_attn_probs=True, block_table=table)
    for x, y in zip(got[:2], packed(q, *keys, begins=(Q_BEGINS, K_BEGINS), **call), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    # A length that is no int is not read.
    o = fa.flash_attn_varlen_func(q, *pages, *begins, torch.tensor(7), None, **call, block_table=table)
    assert torch.equal(o, got[0])


# ---------------------------------------------------------------------------------------------------------------- cache


def rotated(x: Tensor, angles: Tensor, positions: list[int], *, interleaved: bool) -> Tensor:
    """x `[S, H, D]`: columns as complex numbers, times `exp(i angle)`; the other columns are unchanged."""
    half = angles.shape[1]
    pairs = x[..., : 2 * half].double()
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles[positions])[:, None])
    turned = turned if interleaved else turned.mT
    return torch.cat([turned.flatten(-2), x[..., 2 * half :].double()], -1)


LENGTHS = [6, 0, 11]


@pytest.mark.parametrize(("where", "num_splits"), [("rows", 0), ("chosen rows", 1), ("left padding", 0), ("pages", 3)])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
@pytest.mark.parametrize("call", [{}, {"causal": True, "window_size": (4, 0)}], ids=str)
def test_caches(call: dict[str, Any], rotary: bool | None, where: str, num_splits: int) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 2, 4, 16), torch.randn(2, 3, 2, 2, 16)
    given: dict[str, Any] = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    first = [0, 0, 0]
    if where == "pages":
        table = torch.tensor([[7, 2, 4, 1], [0, 9, 3, 5], [8, 6, 10, 11]], dtype=torch.int32)
        caches = torch.randn(2, 12, 4, 2, 16)
        rows = [caches[:, table[b]].flatten(1, 2) for b in range(3)]
        given["block_table"] = table
    else:
        caches = torch.randn(2, 5, 16, 2, 16) if where == "chosen rows" else torch.randn(2, 3, 16, 2, 16)
        places = [4, 1, 0] if where == "chosen rows" else [0, 1, 2]
        rows = [caches[:, place] for place in places]
        if where == "chosen rows":
            given["cache_batch_idx"] = torch.tensor(places, dtype=torch.int32)
        if where == "left padding":
            first = [2, 0, 5]
            given["cache_leftpad"] = torch.tensor(first, dtype=torch.int32)
    rows = [x.clone() for x in rows]
    angles = torch.randn(16, 4, dtype=torch.float64)
    if rotary is not None:
        given |= {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float(), "rotary_interleaved": rotary}
    got = fa.flash_attn_with_kvcache(q, *caches, k, v, **given, **call, num_splits=num_splits, return_softmax_lse=True)
    for b, length in enumerate(LENGTHS):
        own_q, own_k, end = q[b], k[b], length + 2
        if rotary is not None:
            at_queries = [length, length + 1] if call else [length, length]
            own_q = rotated(own_q, angles, at_queries, interleaved=rotary)
            own_k = rotated(own_k, angles, [length, length + 1], interleaved=rotary)
        rows[b][0, length:end], rows[b][1, length:end] = own_k, v[b]
        want_o, want_lse = batched(own_q[None], *(x[None, first[b] : end] for x in rows[b]), **call)
        torch.testing.assert_close(got[0][b].double(), want_o[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got[1][b].double(), want_lse[0], atol=2e-5, rtol=2e-5)
    written = caches[:, table].flatten(2, 3) if where == "pages" else caches[:, places]
    torch.testing.assert_close(written, torch.stack(rows, 1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"causal": True, "window_size": (4, 0)}, True),
        # flash_attn takes a window as large as the cache for none.
        ({"causal": True, "window_size": (16, 0)}, True),
        ({"window_size": (16, -1)}, False),
    ],
    ids=str,
)
def test_more_queries_than_new_keys(call: dict[str, Any], steps: bool) -> None:
    """Query i is rotated by position `cache_seqlens + i`, though the last query sees as far as the last key."""
    torch.manual_seed(0)
    q, (k, v), caches = torch.randn(2, 5, 4, 16), torch.randn(2, 2, 2, 2, 16), torch.randn(2, 2, 16, 2, 16)
    lengths = [6, 14]
    angles = torch.randn(19, 8, dtype=torch.float64)
    rows = caches.clone()
    given: dict[str, Any] = {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}
    given |= {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), **call}
    got = fa.flash_attn_with_kvcache(q, *caches, k, v, **given)
    for b, length in enumerate(lengths):
        own_q = rotated(q[b], angles, [length + i * steps for i in range(5)], interleaved=True)
        rows[0, b, length : length + 2] = rotated(k[b], angles, [length, length + 1], interleaved=True)
        rows[1, b, length : length + 2] = v[b]
        want, _ = batched(own_q[None], *rows[:, b, None, : length + 2], **call)
        torch.testing.assert_close(got[b].double(), want[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(caches, rows, atol=1e-6, rtol=1e-6)


def test_a_cache_that_nothing_is_added_to() -> None:
    q, caches = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 8, 2, 16)
    whole, _ = batched(q, *caches, softcap=20.0, causal=True)
    call = {"softcap": 20.0, "causal": True}
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, *caches, **call).double(), whole, atol=2e-5, rtol=2e-5)
    part, _ = batched(q, *caches[:, :, :5], softcap=20.0, causal=True)
    got = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=5, **call)
    torch.testing.assert_close(got.double(), part, atol=2e-5, rtol=2e-5)


def test_a_cache_may_have_more_rows_than_there_are_sequences() -> None:
    """As in flash_attn, sequence b has row b."""
    q, k, v, caches = torch.randn(2, 1, 4, 16), *torch.randn(2, 2, 1, 2, 16), torch.randn(2, 5, 8, 2, 16)
    before = caches.clone()
    got = fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=4, causal=True)
    own = before[:, :2, :5]
    own[:, :, 4:] = torch.stack((k, v))
    want, _ = batched(q, *own, causal=True)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert torch.equal(caches, before)  # `own` is a part of `before`


@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (2, 0)])
def test_a_cache_without_queries(batch: int, queries: int) -> None:
    q, caches = torch.randn(batch, queries, 4, 16), torch.randn(2, batch, 8, 2, 16)
    o, lse = fa.flash_attn_with_kvcache(q, *caches, causal=True, return_softmax_lse=True)
    assert (o.shape, lse.shape) == (q.shape, (batch, 4, queries))


@pytest.mark.parametrize("name", ["causal", "return_attn_probs", "deterministic"])
def test_flags_are_true_or_false(name: str) -> None:
    q = torch.zeros(1, 3, 4, 16)
    with pytest.raises(ArgumentError, match=f"^flash_attn_func: {name}: expected True or False, got 'no'"):
        fa.flash_attn_func(q, q, q, **{name: "no"})


def test_a_cache_has_a_row_for_each_sequence() -> None:
    q, caches = torch.zeros(3, 1, 4, 16), torch.zeros(2, 2, 8, 2, 16)
    with pytest.raises(ArgumentError, match="k_cache: expected at least 3 rows, as many as q, without cache_batch_idx"):
        fa.flash_attn_with_kvcache(q, *caches)


NEW = torch.zeros(2, 3, 2, 16)
ONE = NEW[:, :1]
COS = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("softcap", {"softcap": float("nan")}),
        ("softcap", {"softcap": None}),
        ("causal", {"causal": "no"}),
        ("return_softmax_lse", {"return_softmax_lse": 1}),
        ("rotary_interleaved", {"rotary_interleaved": None}),
        ("num_splits", {"num_splits": -2}),
        ("cache_seqlens", {"cache_seqlens": 2.5}),
        ("cache_seqlens", {"cache_seqlens": [1, 2]}),
        ("cache_seqlens", {"cache_seqlens": 9}),
        ("cache_seqlens", {"k": NEW, "v": NEW, "cache_seqlens": torch.tensor([1, 6])}),
        ("k", {"k": NEW[:, :, :1], "v": NEW, "cache_seqlens": 1}),
        ("v", {"k": NEW, "v": NEW[:, :2], "cache_seqlens": 1}),
        ("rotary_cos", {"k": NEW, "v": NEW, "cache_seqlens": 1, "rotary_cos": [1], "rotary_sin": [2]}),
        ("rotary_sin", {"k": NEW, "v": NEW, "cache_seqlens": 1, "rotary_cos": COS, "rotary_sin": COS[:, :4]}),
        # The three queries are rotated by positions 7 to 9.
        ("rotary_cos", {"k": ONE, "v": ONE, "cache_seqlens": 7, "rotary_cos": COS, "rotary_sin": COS, "causal": True}),
        ("cache_batch_idx", {"cache_batch_idx": torch.tensor([0, 2])}),
        ("cache_leftpad", {"cache_seqlens": 2, "cache_leftpad": torch.tensor([0, 3])}),
        ("block_table", {"block_table": torch.zeros(2, dtype=torch.int32)}),
        ("block_table", {"block_table": torch.zeros(2, 1)}),
    ],
    ids=str,
)
def test_bad_arguments_of_a_cache_change_nothing(name: str, call: dict[str, Any]) -> None:
    q, caches = torch.zeros(2, 3, 4, 16), torch.ones(2, 2, 8, 2, 16)
    with pytest.raises(ArgumentError, match=f"^flash_attn_with_kvcache: {name}: expected"):
        fa.flash_attn_with_kvcache(q, *caches, **call)
    assert (caches == 1).all()


# -------------------------------------------------------------------------------------------------------------- padding


def test_padding_is_left_out_and_put_back() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    x = torch.randn(2, 4, 3, 5, requires_grad=True)
    tokens, indices, begins, longest, used = flash_attn_padding.unpad_input(x, mask, unused)
    assert (indices.tolist(), begins.tolist(), longest, used.tolist()) == ([0, 1, 2, 3, 5], [0, 4, 5], 4, [3, 1])
    assert begins.dtype == used.dtype == torch.int32
    assert torch.equal(tokens, torch.cat([x[0], x[1, 1:2]]))
    back = flash_attn_padding.pad_input(tokens, indices, 2, 4)
    real = (mask + unused).bool()
    assert torch.equal(back, torch.where(real[..., None, None], x, 0.0))
    back.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, real[..., None, None].expand_as(x).float())


def test_rows_of_several_sequences() -> None:
    x, lengths = torch.randn(2, 6, 5), torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, begins, longest = flash_attn_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (begins.tolist(), longest, indices.tolist()) == ([0, 2, 5, 11], 6, [0, 1, 2, 3, 4, *range(6, 12)])
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1]]))
    got, rest = flash_attn_padding.index_first_axis_residual(x, torch.tensor([1]))
    assert torch.equal(got[0], x[1])
    assert torch.equal(rest, x)
