"""`generated.integrations.litgpt` in litgpt's models, on the CPU: litgpt 0.5.13. CI runs the tests of
`test_litgpt_contract.py` instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("litgpt", reason="litgpt pins a huggingface-hub that transformers 5.17 does not take")

from litgpt import lora
from litgpt.config import Config
from litgpt.model import GPT

from generated._runtime.core.checks import ArgumentError
from generated.integrations.litgpt import CodegenAttention, use

T, W = 24, 8
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}
"""float32: two layers of sums of at most 64 terms around 1, rounded in another order."""

COMMON: dict[str, Any] = {
    "block_size": 64,
    "padded_vocab_size": 99,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 16,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 96,
}
WINDOW = {"sliding_window_size": W, "sliding_window_indices": [1, 0]}
CAP = {"attention_logit_softcapping": 2.0, "attention_scores_scalar": 20}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "multi-query": {"n_query_groups": 1},
    "window": WINDOW,
    "softcap": CAP,
    "gemma 2": {**WINDOW, **CAP},
    "latent": {
        "n_query_groups": 4,
        "latent_attention": {
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    },
}


def pair(kind: str) -> tuple[GPT, GPT]:
    """litgpt's own model, and a copy that uses the ops. Weights are large, so that softmax is far from uniform."""
    torch.manual_seed(0)
    config = Config(name=kind, **(COMMON | KINDS[kind]))
    own, ours = GPT(config), GPT(config)
    for parameter in own.parameters():
        parameter.data *= 2
    ours.load_state_dict(own.state_dict())
    return own, use(ours)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_every_gradient(kind: str) -> None:
    own, ours = pair(kind)
    logits = [model(tokens(2, T)) for model in (own, ours)]
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)
    for each in logits:
        each.logsumexp(-1).sum().backward()
    gradients = dict(own.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("sliced", [False, True], ids=["whole cache", "maxp1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_what_the_whole_text_gives(kind: str, sliced: bool) -> None:
    """A prompt that is shorter than the window, and then one token after the other, until beyond the window."""
    own, ours = pair(kind)
    text = tokens(2, T)
    want = own(text)
    ours.set_kv_cache(batch_size=2, max_seq_length=T)
    got = []
    with torch.no_grad():
        for begin, end in [(0, 6), *((i, i + 1) for i in range(6, T))]:
            last = end if sliced else None
            got.append(ours(text[:, begin:end], torch.arange(begin, end), input_pos_maxp1=last))
    torch.testing.assert_close(torch.cat(got, 1), want, **CLOSE)


def test_litgpt_itself_drops_the_mask_of_a_capped_layer_on_a_cache() -> None:
    """litgpt adds a bool mask to scores there, so the tests on caches compare with a call on the whole text."""
    own, _ = pair("softcap")
    text = tokens(2, T)
    want = own(text)
    own.set_kv_cache(batch_size=2, max_seq_length=T)
    with torch.no_grad():
        got = own(text, torch.arange(T))
    assert (got - want).abs().max() > 0.1 * want.abs().max()


def test_rows_at_positions_of_their_own() -> None:
    own, ours = pair("softcap")
    text = tokens(2, T)
    want = own(text)
    ours.set_kv_cache(batch_size=2, max_seq_length=T)
    with torch.no_grad():
        ours(text[:, :12], torch.arange(12))
        steps = torch.tensor([[12, 13], [9, 10]])
        got = ours(text.gather(1, steps), steps)
    torch.testing.assert_close(got, want[torch.arange(2)[:, None], steps], **CLOSE)


def test_lora() -> None:
    config = lora.Config(name="lora", lora_r=4, lora_alpha=8, lora_query=True, lora_value=True, **COMMON)
    torch.manual_seed(0)
    own, ours = lora.GPT(config), lora.GPT(config)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(own.state_dict())
    x = tokens(2, T)
    torch.testing.assert_close(use(ours)(x), own(x), **CLOSE)
    assert type(ours.transformer.h[0].attn).__name__ == "CodegenCausalSelfAttention"


def test_use_twice_and_without_attention() -> None:
    ours = use(pair("causal")[1])
    assert [base.__name__ for base in type(ours.transformer.h[0].attn).__bases__] == [
        "CodegenAttention",
        "CausalSelfAttention",
    ]
    assert isinstance(ours.transformer.h[1].attn, CodegenAttention)
    with pytest.raises(ArgumentError, match="model: expected a model of litgpt, with CausalSelfAttention, got Linear"):
        use(torch.nn.Linear(2, 2))


def test_compiled() -> None:
    own, ours = pair("gemma 2")
    x = tokens(2, T)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), own(x), **CLOSE)
