"""Models of transformers on the ops of this package, against transformers' own eager attention in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated._runtime.torch.support import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from generated.integrations.variants import Attention, NotRenderedError, entry, find  # noqa: E402
from tests.support.tiny_models import DECODERS, SIZE, WINDOW, decoder, model  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")

TOLERANCE = 1e-5
"""Of the largest element, the sum of two layers' float32 rounding: 1e-6 is what is met."""

LENGTH, FIRST, PADDED = 24, 11, 7
"""Tokens of a row, of the first of two packed sequences, and of the padding."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hf.register()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, batch: int = 2, length: int = LENGTH) -> Tensor:
    """A mask of a batch whose last row is padded."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, slice(None, PADDED) if side == "left" else slice(-PADDED, None)] = 0
    return mask


def packed() -> dict[str, Any]:
    """Two sequences in a row, said by their positions."""
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
    return {"input_ids": tokens(1), "position_ids": positions}


def boundaries() -> dict[str, Any]:
    """The same as a collator for FlashAttention says it."""
    cu_seqlens = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
    longest = max(FIRST, LENGTH - FIRST)
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def weighted(logits: Tensor) -> Tensor:
    """A loss that every logit has its own weight in."""
    return (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()


def gradients(net: Any, loss: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}


def results(net: Any, implementation: str, inputs: dict[str, Any], real: Tensor | None = None) -> Any:
    """Logits of real tokens, and the gradient of every parameter."""
    net.set_attn_implementation(implementation)
    logits = net(**inputs, use_cache=False).logits
    logits = logits if real is None else logits[real.bool()]
    return logits.detach(), gradients(net, weighted(logits))


def separate(net: Any, inputs: dict[str, Any]) -> Any:
    """The same of two sequences, each on its own, by transformers' eager attention."""
    net.set_attn_implementation("eager")
    ids = inputs["input_ids"]
    logits = torch.cat([net(input_ids=part, use_cache=False).logits for part in (ids[:, :FIRST], ids[:, FIRST:])], 1)
    return logits.detach(), gradients(net, weighted(logits))


def assert_same(got: Any, want: Any) -> None:
    (logits, grads), (want_logits, want_grads) = got, want
    assert_close(logits, want_logits, "logits")
    assert grads.keys() == want_grads.keys()
    # Of a parameter that the loss hardly depends on, rounding is all there is: a size is that of the largest gradients.
    floor = 1e-3 * max(x.abs().max() for x in want_grads.values())
    for name, want_grad in want_grads.items():
        assert_close(grads[name], want_grad, name, floor)


def assert_close(got: Tensor, want: Tensor, what: str, floor: float | Tensor = 0.0) -> None:
    error = (got - want).abs().max() / max(want.abs().max(), torch.as_tensor(floor))
    assert error <= TOLERANCE, f"{what}: {error:.1e}"


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_compute_what_eager_computes(name: str) -> None:
    """Plain, padded on either side, and packed against separate sequences: logits and every gradient."""
    net = decoder(name)
    explanation = hf.explain(net)
    assert explanation.is_served, explanation
    ids = {"input_ids": tokens()}
    assert_same(results(net, "codegen", ids), results(net, "eager", ids))
    for side in ("left", "right"):
        real = padding(side)
        inputs = {**ids, "attention_mask": real}
        assert_same(results(net, "codegen", inputs, real), results(net, "eager", inputs, real))
    want = separate(net, packed())
    assert_same(results(net, "codegen", packed()), want)
    assert_same(results(net, "codegen", {**packed(), **boundaries()}), want)


BERT = {**SIZE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 64, "dropout_rate": 0.0}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
BART = {**SPEECH, "max_position_embeddings": 64}
TEXT = {"input_ids": tokens(), "attention_mask": padding("right")}
PAIRS = {**TEXT, "decoder_input_ids": tokens(2, 9)}
IMAGES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Bert": ("BertForMaskedLM", BERT, TEXT),
    "Roberta": ("RobertaForMaskedLM", BERT, TEXT),
    "Electra": ("ElectraForMaskedLM", BERT, TEXT),
    "ModernBert": ("ModernBertForMaskedLM", {**SIZE, "local_attention": WINDOW, "global_attn_every_n_layers": 2}, TEXT),
    "T5": ("T5ForConditionalGeneration", T5, PAIRS),
    "MT5": ("MT5ForConditionalGeneration", T5, PAIRS),
    "UMT5": ("UMT5ForConditionalGeneration", T5, PAIRS),
    "Bart": ("BartForConditionalGeneration", BART, PAIRS),
    "MBart": ("MBartForConditionalGeneration", BART, PAIRS),
    "Marian": ("MarianMTModel", BART, PAIRS),
    "Pegasus": ("PegasusForConditionalGeneration", BART, PAIRS),
    "Whisper": (
        "WhisperForConditionalGeneration",
        SPEECH,
        {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), "decoder_input_ids": tokens(2, 9)},
    ),
    "ViT": ("ViTForImageClassification", VISION, IMAGES),
    "Deit": ("DeiTForImageClassification", VISION, IMAGES),
    "Dinov2": ("Dinov2ForImageClassification", VISION, IMAGES),
    # Its own weights are so large that more of them magnify the rounding of float32.
    "Siglip": ("SiglipForImageClassification", {"vision_config": VISION, "gain": 1.0}, IMAGES),
}


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_and_pairs_compute_what_eager_computes(name: str) -> None:
    kind, sizes, inputs = OTHERS[name]
    config = getattr(transformers, kind).config_class.__name__
    net = model(kind, config, **sizes)
    assert hf.explain(net, **inputs).is_served, hf.explain(net, **inputs)
    real = inputs["attention_mask"] if "attention_mask" in inputs and "decoder_input_ids" not in inputs else None

    def run(implementation: str) -> Any:
        net.set_attn_implementation(implementation)
        logits = net(**inputs).logits
        logits = logits if real is None else logits[real.bool()]
        return logits.detach(), gradients(net, weighted(logits))

    assert_same(run("codegen"), run("eager"))


def test_at_least_45_architectures_are_served() -> None:
    assert len(DECODERS) + len(OTHERS) >= 45


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "Qwen2", "OPT"])
def test_generates_what_eager_generates(name: str, cache: str) -> None:
    """Greedily, in a batch padded on the left, beyond the window."""
    net = decoder(name)
    ids, real = tokens(2, 12), padding("left", 2, 12)
    found = []
    for implementation in ("eager", "codegen"):
        net.set_attn_implementation(implementation)
        found.append(
            net.generate(
                ids,
                attention_mask=real,
                max_new_tokens=5,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
        )
    assert torch.equal(*found)


def test_generates_from_an_encoder() -> None:
    net = model("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0)
    found = []
    for implementation in ("eager", "codegen"):
        net.set_attn_implementation(implementation)
        found.append(net.generate(**TEXT, max_new_tokens=5, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_packed_sequences_do_not_leak_with_a_cache(name: str) -> None:
    """`use_cache=True`, the default of most configs, with which eager attention sees the sequence before."""
    net = decoder(name)
    want, _ = separate(net, packed())
    net.set_attn_implementation("codegen")
    with torch.no_grad():
        assert_close(net(**packed(), use_cache=True).logits, want, "logits")


def test_packed_sequences_beside_padding_do_not_leak() -> None:
    net = decoder("Llama")
    want, _ = separate(net, packed())
    given = packed()
    ids = torch.cat([given["input_ids"], torch.zeros(1, PADDED, dtype=torch.int64)], 1)
    positions = torch.cat([given["position_ids"], torch.zeros(1, PADDED, dtype=torch.int64)], 1)
    real = torch.ones(1, LENGTH + PADDED, dtype=torch.int64)
    real[:, LENGTH:] = 0
    net.set_attn_implementation("codegen")
    with torch.no_grad():
        logits = net(input_ids=ids, position_ids=positions, attention_mask=real).logits
    assert_close(logits[:, :LENGTH], want, "logits")


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_one_graph(name: str) -> None:
    net = decoder(name)
    net.set_attn_implementation("codegen")
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    padded = {"input_ids": tokens(), "attention_mask": padding("right")}
    with torch.no_grad():
        for inputs in ({"input_ids": tokens()}, packed(), padded):
            assert_close(compiled(**inputs, use_cache=False).logits, net(**inputs, use_cache=False).logits, "logits")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_have_the_same_gradients(reentrant: bool) -> None:
    net = decoder("Gemma2")
    want = results(net, "codegen", packed())
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.train()
    assert_same(results(net, "codegen", packed()), want)


def test_schedules_are_made_once_per_forward_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    found: Any = vars(hf)["schedule"]

    def count(op: Any, cache: dict[Any, Any], *arguments: Any) -> Any:
        before = len(cache)
        blocks = found(op, cache, *arguments)
        made.extend([op.__name__] * (len(cache) - before))
        return blocks

    monkeypatch.setattr(hf, "schedule", count)
    net = decoder("Gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    net.set_attn_implementation("codegen")
    net(**packed())
    assert sorted(made) == ["causal", "window"]
    net(**packed(), **boundaries())
    assert sorted(made) == ["causal", "causal", "window", "window"]


def test_boundaries_written_in_place_are_read_again() -> None:
    """As of a CUDA graph, whose inputs keep their addresses."""
    net = decoder("Llama")
    net.set_attn_implementation("codegen")
    inputs = {**packed(), **boundaries()}
    with torch.no_grad():
        net(**inputs)
        moved = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
        inputs["cu_seq_lens_q"].copy_(moved)
        want = net(**{**inputs, "cu_seq_lens_q": moved, "cu_seq_lens_k": moved}).logits
        assert_close(net(**inputs).logits, want, "logits")


def test_packings_of_calls_without_a_mask_are_kept_for_a_while() -> None:
    """Those of vision towers: new boundaries are read, and old ones do not pile up."""
    from generated.integrations.transformers_sharing import _KEPT, _recent

    q, k, v = torch.randn(3, 1, 2, 12, 16)
    module = torch.nn.Module()
    for cut in range(1, 9):
        cu_seqlens = torch.tensor([0, cut, 12], dtype=torch.int32)
        o, _ = hf.attention(module, q, k, v, None, is_causal=False, cu_seq_lens_q=cu_seqlens)
        want = torch.nn.functional.scaled_dot_product_attention(q[..., :cut, :], k[..., :cut, :], v[..., :cut, :])
        assert_close(o[:, :cut].transpose(1, 2), want, "o")
    assert len(_recent) <= _KEPT


def test_norms_in_float32_beside_values_in_bfloat16() -> None:
    """As PEFT leaves them."""
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    o, _ = hf.attention(module, q, k, v.bfloat16(), None)
    assert o.dtype == torch.bfloat16
    want, _ = hf.attention(module, q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert torch.equal(o, want)


def test_images_see_themselves_whole() -> None:
    """The mask of Gemma 3 with images: an overlay of transformers' own."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = transformers.Gemma3TextConfig(sliding_window=4)
    embeds, groups = torch.zeros(1, 16, 8), torch.full((1, 16), -1)
    groups[:, 3:12] = 0
    q, k, v = torch.randn(3, 1, 2, 16, 16)
    for make in (create_causal_mask, create_sliding_window_causal_mask):
        made = {}
        for implementation in ("eager", "codegen"):
            config._attn_implementation = implementation
            made[implementation] = make(config, embeds, None, None, block_sequence_ids=groups)
        got, _ = hf.attention(torch.nn.Module(), q, k, v, made["codegen"])
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=made["eager"])
        assert_close(got.transpose(1, 2), want, "o")


# ----------------------------------------------------------------------------------------------------- ops of one's own


def test_an_op_under_a_name_of_its_own() -> None:
    from generated.torch import document

    hf.register("by_document", op=document, tensors={"doc": lambda module, batch: batch["doc"]})
    net = decoder("Llama")
    want, _ = separate(net, packed())
    net.set_attn_implementation("by_document")
    doc = (torch.arange(LENGTH) >= FIRST).to(torch.int32)[None]
    positions = packed()["position_ids"]
    with torch.no_grad():
        # Positions only turn q and k here: they would say the same as `doc`.
        logits = net(input_ids=tokens(1), position_ids=positions, doc=doc).logits
    assert_close(logits, want, "logits")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sdpa", {}, "register: name: expected a name that transformers does not use itself, got 'sdpa'"),
        ("own", {"tensors": {"doc": 1}}, "register: tensors: expected None without op"),
    ],
)
def test_bad_registrations_are_one_error(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hf.register(name, **given)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_explain_names_variants_and_restores_the_model() -> None:
    net = decoder("Gemma2")
    explained = hf.explain(net)
    assert str(explained).splitlines() == [
        "Gemma2ForCausalLM: 2 layers call attention, 2 are served",
        f"  model.layers.0.self_attn: band_softcap(before={WINDOW - 1}, after=0, cap=2.0)",
        "  model.layers.1.self_attn: band_softcap(after=0, cap=2.0)",
    ]
    assert net.config._attn_implementation == "eager"


def test_constants_that_are_compiled_in_come_first() -> None:
    net = decoder("Gemma2", sliding_window=4096, attn_logit_softcapping=50.0)
    assert [layer.variant for layer in hf.explain(net).layers] == ["gemma2_local", "band_softcap"]


@pytest.mark.parametrize(("kind", "config"), [("BloomForCausalLM", "BloomConfig"), ("MambaForCausalLM", "MambaConfig")])
def test_models_with_attention_of_their_own_are_not_served(kind: str, config: str) -> None:
    explained = hf.explain(model(kind, config, hidden_size=64, n_layer=2, num_hidden_layers=2, n_head=4, vocab_size=99))
    assert not explained.is_served
    assert "AttentionInterface" in str(explained)


def test_a_model_with_attention_of_its_own_is_one_error() -> None:
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=99)
    net = transformers.BloomForCausalLM._from_config(config, attn_implementation="codegen")
    with pytest.raises(ArgumentError, match=r"attn_implementation: expected a model .* got Bloom"):
        net(tokens())


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


# ------------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize(
    ("wanted", "name", "scalars"),
    [
        (Attention(), "full", {}),
        (Attention(after=0), "causal", {}),
        (Attention(before=7, after=0), "window", {"size": 8}),
        (Attention(before=7, after=7), "band", {"before": 7, "after": 7}),
        (Attention(before=4095, after=0, cap=50.0), "gemma2_local", {}),
        (Attention(before=4095, after=0, cap=30.0), "band_softcap", {"before": 4095, "after": 0, "cap": 30.0}),
        (Attention(after=0, cap=20.0), "softcap", {}),
        (Attention(before=127, after=0, sink=True), "gpt_oss", {}),
        (Attention(before=7, after=0, sink=True), "band_sink", {"before": 7, "after": 0}),
        (Attention(after=0, chunk=8), "chunked", {"size": 8}),
        (Attention(after=0, dropout=True), "causal_dropout", {}),
    ],
)
def test_variants_are_found_by_what_they_compute(wanted: Attention, name: str, scalars: dict[str, Any]) -> None:
    found = find(wanted)
    assert (found.name, found.scalars) == (name, scalars)


@pytest.mark.parametrize(
    "wanted",
    [
        Attention(dropout=True),
        Attention(before=7, after=3, cap=2.0, sink=True),
        Attention(before=7, after=0, chunk=4, bias=True),
        Attention(after=0, images=True, dropout=True),
    ],
)
def test_the_entry_of_an_error_is_one_that_serves(wanted: Attention, tmp_path: Any, monkeypatch: Any) -> None:
    import json

    from codegen.load.spec_file import load
    from codegen.render.package import manifest_entries
    from generated.integrations import variants

    with pytest.raises(NotRenderedError):
        find(wanted)
    (tmp_path / "spec.yaml").write_text(entry(wanted), encoding="utf-8")
    entries = manifest_entries(load(tmp_path / "spec.yaml"))
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"variants": entries}), encoding="utf-8")
    monkeypatch.setattr(variants, "__file__", str(tmp_path / "integrations" / "variants.py"))
    meanings = variants._meanings.__wrapped__()
    assert [variants._matched(meaning, wanted) is not None for meaning in meanings] == [True]
