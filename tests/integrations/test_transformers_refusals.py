"""Messages of the hooks into transformers: `explain`, and one error with the remedy for each call that they refuse."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from generated.integrations import transformers_masks  # noqa: E402
from generated.integrations.variants import NotRenderedError  # noqa: E402
from tests.support.tiny_models import DECODERS, SIZE, WINDOW, decoder, model  # noqa: E402
from tests.support.tiny_others import BERT, T5, VISION  # noqa: E402
from tests.support.tiny_runs import LENGTH, padding, switch, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hf.register()


def test_explain_names_variants_and_restores_the_model() -> None:
    net = decoder("Gemma2")
    explained = hf.explain(net)
    assert str(explained).splitlines() == [
        "Gemma2ForCausalLM: 2 layers call attention, 2 are served",
        f"  model.layers.0.self_attn: band_softcap(before={WINDOW - 1}, after=0, cap=2.0)",
        "  model.layers.1.self_attn: band_softcap(after=0, cap=2.0)",
    ]
    assert net.config._attn_implementation == "eager"


def test_explain_tells_which_parts_of_a_model_run_other_attention() -> None:
    """`set_attn_implementation` does not reach the stacks of T5, whose configs are copies of the model's."""
    net = model("T5ForConditionalGeneration", "T5Config", **T5)
    assert hf.explain(net).is_served
    net.set_attn_implementation("codegen")
    explained = hf.explain(net)
    assert not explained.is_served
    assert {layer.variant for layer in explained.layers} == {"band_bias"}
    assert str(explained).splitlines()[:2] == [
        "T5ForConditionalGeneration: 6 layers call attention, 0 are served",
        "  encoder.block.0.layer.0.SelfAttention to decoder.block.1.layer.1.EncDecAttention: not served: "
        "codegen attention: attn_implementation: expected 'codegen', that of the model: build the model with it, "
        "because set_attn_implementation does not reach this layer, got 'eager'",
    ]
    assert "band_bias" not in str(explained)
    assert "  causal_bias:" in explained.spec()
    assert {part.config._attn_implementation for part in (net.encoder, net.decoder)} == {"eager"}
    switch(net, "codegen")
    assert hf.explain(net).is_served


def test_constants_that_are_compiled_in_come_first() -> None:
    net = decoder("Gemma2", sliding_window=4096, attn_logit_softcapping=50.0)
    assert [layer.variant for layer in hf.explain(net).layers] == ["gemma2_local", "band_softcap"]


OWN_ATTENTION = {
    "Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "Mamba": {"hidden_size": 64, "num_hidden_layers": 2},
    "Mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "num_heads": 4, "n_groups": 1},
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_attention_of_their_own_are_not_served(name: str) -> None:
    explained = hf.explain(model(f"{name}ForCausalLM", f"{name}Config", vocab_size=99, **OWN_ATTENTION[name]))
    assert not explained.is_served
    assert "AttentionInterface" in str(explained)


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_a_model_with_attention_of_its_own_is_one_error(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **OWN_ATTENTION[name])
    net = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="codegen")
    with pytest.raises(ArgumentError, match=rf"attn_implementation: expected a model .* got {name}.*use 'eager'"):
        net(tokens())


def test_a_model_made_of_models_with_the_interface_is_served() -> None:
    net = model("DPRQuestionEncoder", "DPRConfig", **BERT)
    assert hf.explain(net).is_served, hf.explain(net)


READS_THE_MASK = {
    "DeepseekV32": {**SIZE, **DECODERS["DeepseekV3"]},
    "Git": {**SIZE, "vision_config": VISION},
}


@pytest.mark.parametrize("name", READS_THE_MASK)
def test_a_model_that_reads_its_mask_itself_is_one_error(name: str) -> None:
    sizes = {field: value for field, value in READS_THE_MASK[name].items() if value is not None}
    net = model(f"{name}ForCausalLM", f"{name}Config", **sizes)
    message = "codegen attention: attn_implementation: expected a model that only passes its mask on .*: use 'eager'"
    assert re.search(message, str(hf.explain(net)))
    net.set_attn_implementation("codegen")
    with pytest.raises(NotImplementedError, match=message):
        net(tokens())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("of_model", "of_layer"), [("codegen", "eager"), ("codegen", "sdpa"), ("eager", "codegen")])
def test_a_layer_with_another_implementation_than_its_model_is_named(
    of_model: str, of_layer: str, padded: bool
) -> None:
    net = decoder("Llama")
    net.set_attn_implementation(of_model)
    layer = net.model.layers[1].self_attn
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation = of_layer
    message = (
        f"^codegen attention: attn_implementation: expected one in all layers that share a mask: .*, got '{of_layer}' "
        f"in the config of LlamaAttention of layer 1, '{of_model}' in the config of LlamaModel$"
    )
    with pytest.raises((ArgumentError, NotImplementedError), match=message):
        net(tokens(), attention_mask=padding("left") if padded else None)


def test_a_mask_of_flash_attention_names_the_model_that_made_it() -> None:
    net = decoder("Llama")
    for layer in net.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config._attn_implementation = "codegen"
    net.config._attn_implementation = "flash_attention_2"
    message = (
        "got 'codegen' in the config of LlamaAttention of layer 0, 'flash_attention_2' in the config of LlamaModel$"
    )
    with pytest.raises(ArgumentError, match=message):
        net(tokens(), attention_mask=padding("left"))


def test_a_transformers_that_builds_its_masks_otherwise_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.masking_utils, "chunked_overlay")
    with pytest.raises(ImportError, match=r"transformers \S+ builds its masks in another way .*: pip install 'transf"):
        transformers_masks._codes()


def test_heads_that_no_kernel_has_are_one_error() -> None:
    for size, bound in ((520, "512 at most"), (4, "8 at least")):
        q, k, v = torch.zeros(3, 1, 2, 4, size)
        with pytest.raises(ArgumentError, match=f"head_dim: expected {bound}: use 'sdpa' for this model, got {size}"):
            hf.attention(torch.nn.Module(), q, k, v, None)
    explained = hf.explain(decoder("Llama", head_dim=4))
    assert not explained.is_served
    assert "head_dim: expected 8 at least" in str(explained)


def test_dropout_that_is_not_rendered_names_the_entry() -> None:
    net = model("BertForMaskedLM", "BertConfig", **{**BERT, "attention_probs_dropout_prob": 0.1}).train()
    net.set_attn_implementation("codegen")
    with pytest.raises(NotRenderedError, match=r"dropout.*\n\nvariants:\n  full_dropout:\n    dropout: true"):
        net(tokens())
    assert "full_dropout" in str(hf.explain(net))


def test_dropout_of_a_causal_model_is_served() -> None:
    net = decoder("Llama", attention_dropout=0.1).train()
    assert {layer.variant for layer in hf.explain(net).layers} == {"causal_dropout"}
    net.set_attn_implementation("codegen")
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(net(tokens()).logits)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_mask_of_four_axes_is_one_error() -> None:
    net = decoder("Llama")
    net.set_attn_implementation("codegen")
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(ArgumentError, match=r"attention_mask: expected a mask \[batch, length\].* got bool \[2, 1, 24"):
        net(tokens(), attention_mask=mask)


def test_output_attentions_are_one_error() -> None:
    net = decoder("Llama")
    net.set_attn_implementation("codegen")
    with pytest.raises(ArgumentError, match="output_attentions: expected False"):
        net(tokens(), output_attentions=True)


def test_an_overlay_that_is_not_known_is_named() -> None:
    from transformers.masking_utils import create_causal_mask

    def even_keys(*index: Any) -> Any:
        return index[3] % 2 == 0

    config = transformers.LlamaConfig()
    config._attn_implementation = "codegen"
    with pytest.raises(NotImplementedError, match=r"the mask function .*even_keys is none of transformers' own"):
        create_causal_mask(config, torch.zeros(1, 8, 8), None, None, and_mask_function=even_keys)


@pytest.mark.parametrize("with_padding", [False, True])
def test_images_in_a_trace_are_one_error(with_padding: bool) -> None:
    """With the mask of padding that processors give, too. Decoding, in which no token is of an image, is traced."""
    from transformers.masking_utils import create_causal_mask

    config = transformers.Gemma3TextConfig()
    config._attn_implementation = "codegen"
    groups = torch.full((1, 8), -1)
    groups[:, 2:6] = 0

    def masked(embeds: torch.Tensor, padding: Any) -> Any:
        mask = create_causal_mask(config, embeds, padding, None, block_sequence_ids=groups)
        return embeds if mask.after == 0 else None

    traced = torch.compile(masked, backend="eager", fullgraph=True)
    real = torch.ones(1, 8, dtype=torch.int64) if with_padding else None
    with pytest.raises(Exception, match="images that see themselves whole are not readable"):
        traced(torch.zeros(1, 8, 8), real)
    traced(torch.zeros(1, 1, 8), real)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_an_indexer_chooses_are_one_error(name: str) -> None:
    """Also behind a layer without an indexer, whose plan is kept."""
    chosen: Any = {name: torch.zeros(1, 6, 2)}
    mask, q = _mask(6), torch.zeros(1, 2, 6, 16)
    hf.attention(torch.nn.Module(), q, q, q, mask)
    with pytest.raises(ArgumentError, match=rf"{name}: expected None: .* an indexer chooses\. Use 'eager' there"):
        hf.attention(torch.nn.Module(), q, q, q, mask, **chosen)


def test_keys_that_a_mask_does_not_have_are_one_error() -> None:
    """DeepSeek V4 appends compressed keys to those of a layer, and extends a mask that is a tensor."""
    q, k = torch.zeros(1, 2, 6, 16), torch.zeros(1, 2, 8, 16)
    with pytest.raises(ArgumentError, match=r"expected a mask of all 8 keys of the call: .* got one of 6 keys"):
        hf.attention(torch.nn.Module(), q, k, k, _mask(6))


def _mask(length: int) -> Any:
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig()
    config._attn_implementation = "codegen"
    return create_causal_mask(config, torch.zeros(1, length, 8), None, None)
