"""Calls with a bias for each pair beside a cache: the bias is indexed by query rows, the mask by positions."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from codegen.cli.main import main  # noqa: E402
from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from tests.support.tiny_models import SIZE, WINDOW, model  # noqa: E402
from tests.support.tiny_others import T5  # noqa: E402
from tests.support.tiny_runs import assert_close, assert_same_generation, generated, switch, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")

SEEN = 6
"""Tokens of the decoder's prompt."""
INKLING = {
    **SIZE,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 8,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "dense"],
}


@pytest.fixture(scope="module", params=["generated", "own"])
def implementation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of this package's attention, or of a package whose causal bound is compiled into its variant."""
    if request.param == "generated":
        hf.register()
        return "codegen"
    folder: Path = tmp_path_factory.mktemp("rendered")
    config = transformers.T5Config(**T5, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(folder)
    out = folder / "t5_package"
    assert main(["render", "--from-config", str(folder / "config.json"), "--out", str(out)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        own = importlib.import_module("t5_package.integrations.transformers")
    net = t5()
    assert [layer.variant for layer in own.explain(net).layers] == ["bias"] * 2 + ["causal_bias", "bias"] * 2
    own.register("of_t5")
    return "of_t5"


def t5() -> Any:
    net = model("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0)
    with torch.no_grad():
        for name, x in net.named_parameters():
            if name.endswith((".q.weight", "relative_attention_bias.weight")):
                x.mul_(4.0)
    return net


def real(length: int) -> torch.Tensor:
    """A mask of the decoder's tokens: two tokens of padding before the first of the last row."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[-1, :2] = 0
    return mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_t5_generates_what_eager_generates(implementation: str, cache: str, padded: bool) -> None:
    net = t5()
    call = {"decoder_input_ids": tokens(2, SEEN), "max_new_tokens": 4, "eos_token_id": None}
    call |= {"decoder_attention_mask": real(SEEN)} if padded else {}
    found = []
    for name in ("eager", implementation):
        switch(net, name)
        found.append(generated(net, **call, cache_implementation=cache))
    want, got = found
    assert_same_generation(got, want)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_several_queries_on_a_cache_that_holds_keys(implementation: str, kind: str) -> None:
    """As with drafted tokens, or with a prompt in parts."""
    net = t5()
    ids = tokens(2, 12)
    size = {"config": net.config.get_text_config(decoder=True), "max_cache_len": 16} if kind == "StaticCache" else {}
    with torch.no_grad():
        encoded = net.encoder(tokens(2, 9))
        want = net(encoder_outputs=encoded, decoder_input_ids=ids).logits
        switch(net, implementation)
        keys = transformers.EncoderDecoderCache(
            getattr(transformers, kind)(**size), transformers.DynamicCache(config=net.config)
        )
        got = [
            net(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=keys).logits
            for part in ids.split([5, 4, 1, 2], 1)
        ]
    assert_close(torch.cat(got, 1), want, "logits")


def test_a_window_beside_a_bias_and_a_cache() -> None:
    """Only on a dynamic cache: on a static one eager attention of Inkling fails."""
    hf.register()
    net = model("InklingForCausalLM", "InklingTextConfig", **{**INKLING, "sliding_window_size": WINDOW})
    assert hf.explain(net).is_served, hf.explain(net)
    found = []
    for name in ("eager", "codegen"):
        switch(net, name)
        keys = transformers.DynamicCache(config=net.config)
        with torch.no_grad():
            logits = [net(part, past_key_values=keys).logits for part in tokens(2, 24).split([5, 1, 1, 10, 1, 6], 1)]
        found.append(torch.cat(logits, 1))
    want, got = found
    assert_close(got, want, "logits")


@pytest.mark.filterwarnings("ignore")
def test_compiled_decoding_with_a_bias(implementation: str) -> None:
    net = t5()
    ids = tokens(2, 10)
    sizes = {"config": net.config.get_text_config(decoder=True)}
    with torch.no_grad():
        encoded = net.encoder(tokens(2, 9))
        want = net(encoder_outputs=encoded, decoder_input_ids=ids).logits
        switch(net, implementation)
        keys = transformers.EncoderDecoderCache(
            transformers.StaticCache(**sizes, max_cache_len=16), transformers.StaticCache(**sizes, max_cache_len=9)
        )
        torch.compiler.reset()
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        got = [
            run(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=keys).logits
            for run, part in zip((net, compiled, compiled), ids.split([6, 1, 3], 1), strict=True)
        ]
    assert_close(torch.cat(got, 1), want, "logits")
