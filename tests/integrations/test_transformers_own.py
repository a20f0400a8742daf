"""Ops that users register under a name of their own, and masks that models overlay by functions of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated import torch as ops  # noqa: E402
from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from tests.support.tiny_models import SIZE, WINDOW, decoder, model  # noqa: E402
from tests.support.tiny_runs import (  # noqa: E402
    FIRST,
    LENGTH,
    assert_close,
    assert_same,
    gradients,
    packed,
    padding,
    tokens,
    weighted,
)

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hf.register()


def embedding_gemma(**more: Any) -> Any:
    """A model whose tokens see both sides, which it tells by overlays of functions of its own."""
    size = {**SIZE, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True, "sliding_window": WINDOW}
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    return model("Gemma3TextModel", "Gemma3TextConfig", **{**size, **types, **more})


def test_overlays_of_gemma_3_are_read() -> None:
    net = embedding_gemma()
    radius = WINDOW // 2
    assert [layer.text for layer in hf.explain(net).layers] == [f"band(before={radius}, after={radius})", "full"]
    calls: tuple[dict[str, Any], ...] = (
        {"input_ids": tokens()},
        {"input_ids": tokens(), "attention_mask": padding("left")},
        {"input_ids": tokens(), "attention_mask": padding("right")},
        {**packed(), "use_cache": False},
    )
    for call in calls:
        real = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        found = []
        for name in ("codegen", "eager"):
            net.set_attn_implementation(name)
            hidden = net(**call).last_hidden_state[real]
            found.append((hidden.detach(), gradients(net, weighted(hidden))))
        assert_same(*found)


def test_packed_sequences_that_see_both_sides_are_kept_apart() -> None:
    """An overlay of packed sequences, as that of ESM C, and none of causality."""
    from transformers.masking_utils import create_bidirectional_mask, packed_sequence_mask_function

    ids = (torch.arange(LENGTH) >= FIRST).long()[None]
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    config = transformers.LlamaConfig()
    config._attn_implementation = "codegen"
    overlay = packed_sequence_mask_function(ids)
    mask = create_bidirectional_mask(config, torch.zeros(1, LENGTH, 8), None, and_mask_function=overlay)
    got, _ = hf.attention(torch.nn.Module(), q, k, v, mask)
    keep = ids[:, None, :, None] == ids[:, None, None, :]
    assert_close(got.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep), "o")


def even_keys(*index: Any) -> Any:
    """A mask function that only its author knows."""
    return index[3] % 2 == 0


def masked_by(name: str, **overlays: Any) -> Any:
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig()
    config._attn_implementation = name
    return create_causal_mask(config, torch.zeros(2, LENGTH, 8), padding("right").bool(), None, **overlays)


@pytest.mark.parametrize("overlay", ["or_mask_function", "and_mask_function"])
def test_an_own_op_replaces_overlays_that_are_not_known(overlay: str) -> None:
    """That is the advice of the error which the model gets without an op. Padding is kept apart as ever."""
    hf.register("both_sides", op=ops.full)
    overlays: dict[str, Any] = {overlay: even_keys}
    with pytest.raises(NotImplementedError, match=r"even_keys is none of .* register\(name, op=..., tensors=...\)"):
        masked_by("codegen", **overlays)
    q, k, v = torch.randn(3, 2, 2, LENGTH, 16)
    attend = transformers.AttentionInterface()["both_sides"]
    got, _ = attend(torch.nn.Module(), q, k, v, masked_by("both_sides", **overlays))
    real = padding("right").bool()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
    assert_close(got[real], want.transpose(1, 2)[real], "o")


@pytest.mark.filterwarnings("ignore")
def test_an_own_op_replaces_overlays_in_a_trace() -> None:
    hf.register("both_sides", op=ops.full)
    net = embedding_gemma(layer_types=["full_attention"] * 2)
    call = {"input_ids": tokens(), "attention_mask": padding("right"), "use_cache": False}
    real = padding("right").bool()
    with torch.no_grad():
        want = net(**call).last_hidden_state[real]
        net.set_attn_implementation("both_sides")
        assert_close(net(**call).last_hidden_state[real], want, "hidden states")
        torch.compiler.reset()
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        assert_close(compiled(**call).last_hidden_state[real], want, "hidden states")


def test_an_overlay_of_two_bounds_is_as_wide_as_the_wider_one() -> None:
    from transformers.masking_utils import sliding_window_bidirectional_overlay, sliding_window_overlay

    narrow, wide = sliding_window_bidirectional_overlay(2), sliding_window_bidirectional_overlay(5)
    for overlays, sides in (
        ({"or_mask_function": narrow}, (None, 2)),
        ({"and_mask_function": wide}, (5, 0)),
        ({"or_mask_function": wide, "and_mask_function": narrow}, (2, 2)),
        ({"or_mask_function": wide, "and_mask_function": sliding_window_overlay(4)}, (3, 5)),
    ):
        mask = masked_by("codegen", **overlays)
        assert (mask.before, mask.after) == sides


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_keys_that_a_sliding_cache_dropped_are_one_error(cache: str) -> None:
    """The op's mask may keep them. Without a window in the config the cache keeps them, too."""
    hf.register("all_keys", op=ops.causal)
    call = {"attention_mask": torch.ones(2, 12, dtype=torch.int64), "max_new_tokens": 3, "do_sample": False}
    call |= {"cache_implementation": cache, "disable_compile": True, "eos_token_id": None}
    net = decoder("Mistral")
    net.set_attn_implementation("all_keys")
    message = (
        "attention_mask: expected one of all keys from the first on, because the mask of causal replaces it: "
        "set sliding_window=None in the config, or use_cache=False, got keys from position 5 on: "
        "the cache has dropped others"
    )
    with pytest.raises(ArgumentError, match=message):
        net.generate(tokens(2, 12), **call)
    net = decoder("Mistral", sliding_window=None)
    found = []
    for name in ("eager", "all_keys"):
        net.set_attn_implementation(name)
        found.append(net.generate(tokens(2, 12), **call, return_dict_in_generate=True, output_logits=True))
    assert_close(torch.stack(found[1].logits), torch.stack(found[0].logits), "logits")


@pytest.mark.parametrize("registered", [None, ops.causal])
def test_a_part_of_a_text_without_a_mask_is_one_error(registered: Any) -> None:
    """Moshi makes no mask without an `attention_mask`, and its cache may have room behind the queries or keys before
    them."""
    hf.register("without_mask", op=registered)
    attend = transformers.AttentionInterface()["without_mask"]
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ArgumentError, match=r"attention_mask: expected one, .*, got none, and 3 queries of 8 keys"):
        attend(torch.nn.Module(), q, k, k, None)
    attend(torch.nn.Module(), q[:, :, :1], k, k, None)
    attend(torch.nn.Module(), q, k, k, None, is_causal=False)


def test_moshi_on_a_static_cache() -> None:
    config = transformers.MoshiConfig(
        **{**SIZE, "pad_token_id": None}, ffn_dim=64, audio_vocab_size=32, sliding_window=64
    )
    torch.manual_seed(0)
    net = transformers.MoshiForCausalLM._from_config(config, attn_implementation="codegen").eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        want = net(ids, use_cache=False).logits
        keys = transformers.StaticCache(config=config, max_cache_len=16)
        with pytest.raises(ArgumentError, match="attention_mask: expected one"):
            net(ids, past_key_values=keys)
        keys.reset()
        got = net(ids, attention_mask=torch.ones_like(ids), past_key_values=keys).logits
    assert_close(got, want, "logits")


def test_images_that_a_window_would_cut_are_one_error() -> None:
    """In Gemma's sliding layers the window holds for images, too. The variant keeps images whole."""
    from transformers.masking_utils import blockwise_overlay, create_causal_mask, sliding_window_overlay

    length = 9
    groups = torch.full((1, LENGTH), -1)
    groups[:, 3 : 3 + length] = 0

    def masked(name: str, window: int) -> Any:
        config = transformers.LlamaConfig()
        config._attn_implementation = name
        overlays = {"or_mask_function": blockwise_overlay(groups), "and_mask_function": sliding_window_overlay(window)}
        return create_causal_mask(config, torch.zeros(1, LENGTH, 8), None, None, **overlays)

    with pytest.raises(ArgumentError, match=r"image: expected images of 8 tokens at most, .*, got longer ones"):
        masked("codegen", length - 1)
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    got, _ = hf.attention(torch.nn.Module(), q, k, v, masked("codegen", length))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=masked("eager", length))
    assert_close(got.transpose(1, 2), want, "o")
