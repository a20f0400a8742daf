"""The stand-in for the package flash_attn: its installation, signatures, errors, and the arguments that ops get."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from generated import torch as ops
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated.integrations import flash_attn_padding
from generated.integrations.variants import NotRenderedError
from tests.support.flash_reference import drawn, qkv
from tests.support.fresh import python

fa: Any = importlib.import_module("generated.integrations.flash_attn")
"""Any, because the functions return one tensor or several, depending on their arguments."""

pytestmark = pytest.mark.skipif(INTERPRET, reason="tests/kernels/test_flash_attn.py has the cases of the interpreter")


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
    """transformers 5.17: without a GPU it does not look for the package."""
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


def test_transformers_generates_from_a_padded_batch() -> None:
    """In decoding, transformers 5.17 gives `pad_input` indices of int32."""
    pytest.importorskip("transformers", reason="its own attention calls the package")
    lines = """
from generated.integrations import flash_attn as fa
fa.install()
import torch, transformers
from transformers import modeling_flash_attention_utils, modeling_utils
for module in modeling_utils, modeling_flash_attention_utils:
    module.is_flash_attn_2_available = lambda *_, **__: True
transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
size = dict(vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
config = transformers.LlamaConfig(**size, num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=None)
ids, mask = torch.randint(3, 99, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
mask[0, :4] = 0
found = []
for name in "eager", "flash_attention_2":
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()
    call = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    found.append(net.generate(ids, **call, return_dict_in_generate=True, output_logits=True))
want, got = found
torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-5)
assert torch.equal(got.sequences, want.sequences)
print("done")
"""
    assert python(lines).endswith("done\n")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_tokens_may_be_of_either_integer_dtype(dtype: torch.dtype) -> None:
    x, indices = torch.arange(6.0).view(3, 2), torch.tensor([3, 0, 1], dtype=dtype)
    padded = flash_attn_padding.pad_input(x, indices, 2, 2)
    want = torch.tensor([[[2.0, 3.0], [4.0, 5.0]], [[0.0, 0.0], [0.0, 1.0]]])
    assert torch.equal(padded, want)
    assert torch.equal(flash_attn_padding.index_first_axis(padded.flatten(0, 1), indices), x)
    assert torch.equal(flash_attn_padding.index_first_axis_residual(padded.flatten(0, 1), indices)[0], x)


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
                q, cache, cache, block_table=torch.zeros(2, 1).int(), cache_leftpad=torch.zeros(2)
            ),
            r"cache_leftpad: expected None beside block_table",
        ),
        (lambda: fa.flash_attn_with_kvcache(q, cache[:1], cache[:1]), r"k_cache: expected at least 2 rows"),
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


COMPILED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "a window": {"causal": True, "window_size": (5, 0)},
    "a cap": {"causal": True, "window_size": (5, 0), "softcap": 20.0},
    "slopes": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.4, 4)},
    "dropout": {"causal": True, "dropout_p": 0.25},
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_graph(name: str, dynamic: bool | None) -> None:
    """With dynamic shapes the numbers of a call are symbols. A compiled call draws the seed that the op would draw."""
    torch.compiler.reset()
    call = COMPILED[name]
    compiled = torch.compile(fa.flash_attn_func, backend="eager", fullgraph=True, dynamic=dynamic)
    for attempt in range(2):
        results = []
        for function in (compiled, fa.flash_attn_func):
            torch.manual_seed(attempt)
            q, k, v = (x.detach().requires_grad_() for x in qkv())
            o = function(q, k, v, **call)
            results.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
        torch.testing.assert_close(*results, atol=0, rtol=0)


def test_packed_calls_pass_on_the_longest_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ops, "causal", lambda q, _k, _v, **call: (given.update(call), q)[1])
    x, begins = drawn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    fa.flash_attn_varlen_func(x, x, x, begins, begins, 5, torch.tensor(5), causal=True)
    assert (given["max_seqlen_q"], "max_seqlen_k" in given) == (5, False)
    fa.flash_attn_varlen_qkvpacked_func(torch.stack([x, x, x], 1), begins, 5, causal=True)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (5, 5)
