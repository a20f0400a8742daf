"""The functions of flash_attn 2.8 against what that package documents, in float64; its source is not needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import torch as ops
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated._runtime.torch.philox import dropout_words
from generated.integrations import flash_attn_padding
from generated.integrations.variants import Attention, NotRenderedError, entry
from tests.support.flash_reference import batched, packed
from tests.support.fresh import python
from tests.support.rendering import importable

fa: Any = importlib.import_module("generated.integrations.flash_attn")
"""Of any type: the functions return one tensor or several, by their arguments."""

pytestmark = pytest.mark.skipif(INTERPRET, reason="tests/kernels/test_flash_attn.py has the cases of the interpreter")

KINDS = [
    Attention(after=0, alibi="b, h"),
    Attention(alibi="h"),
    Attention(after=0, before=5, cap=2.0, alibi="h"),
    Attention(after=3, before=5, cap=2.0, alibi="b, h"),
    Attention(dropout=True),
]
"""What the repository's own package has no variant for."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`flash_attn` of a package rendered from the entries that errors propose."""
    spec = "variants:\n" + "".join(entry(kind).removeprefix("variants:\n") + "\n" for kind in KINDS)
    with importable(tmp_path_factory.mktemp("package"), "flash_variants", spec) as folder:
        yield importlib.import_module(f"{folder.name}.integrations.flash_attn")


def drawn(*shape: int) -> Tensor:
    """Random numbers whose products reach a softcap, as a parameter."""
    return (torch.randn(*shape) * 1.5).requires_grad_()


def qkv(rows: int = 9, keys: int = 13, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(rows * 100 + keys)
    return drawn(batch, rows, heads, 16), drawn(batch, keys, kv_heads, 16), drawn(batch, keys, kv_heads, 16)


def assert_same(got: Any, want: Any, inputs: Any) -> None:
    """Outputs, lse and the gradients of both, float32 against float64."""
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


# ---------------------------------------------------------------------------------------------------------------- cache


def rotated(x: Tensor, angles: Tensor, positions: list[int], *, interleaved: bool) -> Tensor:
    """x `[S, H, D]` as complex numbers times `exp(i angle)`, its other columns as they are."""
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


def test_a_cache_that_nothing_is_added_to() -> None:
    q, caches = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 8, 2, 16)
    whole, _ = batched(q, *caches, softcap=20.0, causal=True)
    call = {"softcap": 20.0, "causal": True}
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, *caches, **call).double(), whole, atol=2e-5, rtol=2e-5)
    part, _ = batched(q, *caches[:, :, :5], softcap=20.0, causal=True)
    got = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=5, **call)
    torch.testing.assert_close(got.double(), part, atol=2e-5, rtol=2e-5)


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


# -------------------------------------------------------------------------------------------------------------- install


def test_install_makes_the_package_importable_and_uninstall_undoes_it() -> None:
    modules, finders = dict(sys.modules), list(sys.meta_path)
    fa.install()
    fa.install()
    try:
        import flash_attn
        from flash_attn.bert_padding import unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func

        assert (flash_attn.flash_attn_func, unpad_input) == (fa.flash_attn_func, flash_attn_padding.unpad_input)
        assert flash_attn_varlen_qkvpacked_func is fa.flash_attn_varlen_qkvpacked_func
        assert flash_attn.__version__ == importlib.metadata.version("flash-attn") == "2.8.3+codegen"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        for name in ("flash_attn", "flash_attn.bert_padding"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.name == name
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
            importlib.import_module("flash_attn.layers.rotary")
    finally:
        fa.uninstall()
        fa.uninstall()
    assert sys.meta_path == finders
    assert sys.modules == modules
    assert importlib.util.find_spec("flash_attn") is None
    assert "flash_attn" not in importlib.metadata.packages_distributions()


def test_install_refuses_a_process_that_has_imported_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(RuntimeError, match=r"install: flash_attn: expected a process that .*, got flash_attn of None"):
        fa.install()
    fa.uninstall()
    assert sys.modules["flash_attn"] is real


def test_transformers_finds_it_if_installed_before() -> None:
    """transformers 5.17: without a GPU it asks nothing of the package."""
    pytest.importorskip("transformers", reason="asks whether transformers finds the package")
    lines = """
from generated.integrations import flash_attn as fa
fa.install()
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
functions, _ = lazy_import_flash_attention("flash_attention_2")
assert functions[:3] == (fa.flash_attn_func, fa.flash_attn_varlen_func, fa.flash_attn_with_kvcache)
print("done")
"""
    assert python(lines).endswith("done\n")


SIGNATURES = {
    "flash_attn_func": "q k v",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}
DEFAULTS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
CACHE_DEFAULTS = {
    **dict.fromkeys(["k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"]),
    **dict.fromkeys(["cache_leftpad", "block_table", "softmax_scale"]),
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}


def test_signatures_are_the_packages() -> None:
    for name, positional in SIGNATURES.items():
        defaults = DEFAULTS | ({"block_table": None} if name == "flash_attn_varlen_func" else {})
        parameters = inspect.signature(getattr(fa, name)).parameters
        assert list(parameters) == [*positional.split(), *defaults]
        assert {x.name: x.default for x in parameters.values() if x.default is not x.empty} == defaults
    parameters = inspect.signature(fa.flash_attn_with_kvcache).parameters
    assert list(parameters) == ["q", "k_cache", "v_cache", *CACHE_DEFAULTS]
    assert {x.name: x.default for x in parameters.values() if x.default is not x.empty} == CACHE_DEFAULTS


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors_name_the_argument() -> None:
    q, k, v = (x.detach() for x in qkv(9, 9))
    cache = torch.zeros(2, 16, 2, 16)
    new = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": 3}
    for call, match in (
        (lambda: fa.flash_attn_func(q, k, v, window_size=3), r"func: window_size: expected two ints .*, got 3"),
        (lambda: fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(3)), r"alibi_slopes: .*\[4\] or \[2, 4\], got"),
        (lambda: fa.flash_attn_func(q, k, v, 0.1, return_attn_probs=True), r"return_attn_probs: expected False beside"),
        (lambda: fa.flash_attn_func(q[0], k, v), r"q: expected a tensor of 4 axes \[B, S, H, D\], got \[9, 4, 16\]"),
        (lambda: fa.flash_attn_qkvpacked_func(q), r"qkv: expected a tensor of 5 axes \[B, S, 3, H, D\]"),
        (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k), r"v: expected given with the other of k and v"),
        (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k, v), r"cache_seqlens: expected given beside k"),
        (
            lambda: fa.flash_attn_with_kvcache(q, cache, cache, rotary_cos=cache, rotary_sin=cache),
            r"rotary_cos: expected None without k",
        ),
        (
            lambda: fa.flash_attn_with_kvcache(q, cache, cache, **new, rotary_cos=q[0, :, 0], rotary_sin=q[0, :, 0]),
            r"rotary_cos: expected \[at least 16, at most 8\]",
        ),
        (
            lambda: fa.flash_attn_with_kvcache(
                q, cache, cache, block_table=torch.zeros(2, 1), cache_leftpad=torch.zeros(2)
            ),
            r"cache_leftpad: expected None beside block_table",
        ),
        (lambda: fa.flash_attn_with_kvcache(q[:1], cache, cache), r"k_cache: expected 1 rows"),
        (
            lambda: fa.flash_attn_with_kvcache(q.clone().requires_grad_(), cache, cache),
            r"q: expected a tensor without gradient",
        ),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()


def test_dropout_that_is_not_rendered_names_the_entry() -> None:
    with pytest.raises(NotRenderedError, match="full_dropout:\n    dropout: true"):
        fa.flash_attn_func(*qkv(), dropout_p=0.1)


def test_compiles_to_one_graph() -> None:
    inputs = qkv()
    compiled = torch.compile(fa.flash_attn_func, backend="eager", fullgraph=True)
    got = compiled(*inputs, causal=True, window_size=(5, 0))
    torch.testing.assert_close(got, fa.flash_attn_func(*inputs, causal=True, window_size=(5, 0)), atol=0, rtol=0)


def test_packed_calls_pass_on_the_longest_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ops, "causal", lambda q, _k, _v, **call: (given.update(call), q)[1])
    x, begins = drawn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    fa.flash_attn_varlen_func(x, x, x, begins, begins, 5, torch.tensor(5), causal=True)
    assert (given["max_seqlen_q"], "max_seqlen_k" in given) == (5, False)
    fa.flash_attn_varlen_qkvpacked_func(torch.stack([x, x, x], 1), begins, 5, causal=True)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (5, 5)
