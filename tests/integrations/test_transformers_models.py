"""Every architecture: transformers' own eager attention in float32 is the reference of logits, gradients and tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from generated.integrations.transformers_plans import Plan  # noqa: E402
from tests.support.tiny_models import DECODERS, decoder, model  # noqa: E402
from tests.support.tiny_others import OTHERS, T5, TEXT  # noqa: E402
from tests.support.tiny_runs import (  # noqa: E402
    LENGTH,
    assert_close,
    assert_same,
    assert_same_generation,
    boundaries,
    generated,
    gradients,
    packed,
    padding,
    results,
    separate,
    switch,
    tokens,
    weighted,
)

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hf.register()


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_compute_what_eager_computes(name: str) -> None:
    """Logits and every gradient of plain batches, padding on either side, and packed against separate sequences."""
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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that models call."""
    called: list[str] = []
    run = Plan.run

    def counted(plan: Any, *arguments: Any) -> Any:
        called.append(plan.op.__name__)
        return run(plan, *arguments)

    monkeypatch.setattr(Plan, "run", counted)
    return called


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_and_pairs_compute_what_eager_computes(name: str, calls: list[str]) -> None:
    kind, sizes, inputs = OTHERS[name]
    config = getattr(transformers, kind).config_class.__name__
    net = model(kind, config, **sizes)
    explained = hf.explain(net, **inputs)
    assert explained.is_served, explained
    real = inputs["attention_mask"] if "attention_mask" in inputs and "decoder_input_ids" not in inputs else None

    def run(implementation: str) -> Any:
        switch(net, implementation)
        logits = net(**inputs).logits
        logits = logits if real is None else logits[real.bool()]
        return logits.detach(), gradients(net, weighted(logits))

    want = run("eager")
    assert not calls
    assert_same(run("codegen"), want)
    assert calls == [layer.variant for layer in explained.layers]


def test_at_least_45_architectures_are_served() -> None:
    assert len(DECODERS) + len(OTHERS) >= 45


NO_STATIC_CACHE = {"Llama4": "transformers' own mask of chunks takes no cache of fixed size"}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generates_what_eager_generates(name: str, cache: str) -> None:
    """Greedy tokens, and their logits, of a batch padded on the left, to lengths beyond the window."""
    if cache == "static" and name in NO_STATIC_CACHE:
        pytest.skip(NO_STATIC_CACHE[name])
    net = decoder(name)
    call = {"attention_mask": padding("left", 2, 12), "max_new_tokens": 5, "cache_implementation": cache}
    found = []
    for implementation in ("eager", "codegen"):
        net.set_attn_implementation(implementation)
        found.append(generated(net, **call))
    want, got = found
    assert_same_generation(got, want)


def test_generates_from_an_encoder(calls: list[str]) -> None:
    net = model("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0)
    found = []
    for implementation in ("eager", "codegen"):
        switch(net, implementation)
        found.append(net.generate(**TEXT, max_new_tokens=5, do_sample=False, eos_token_id=None))
    assert torch.equal(*found)
    encoder, decoder_step = 2, 4
    assert len(calls) == encoder + 5 * decoder_step


CALLS = {
    "plain": lambda: {"input_ids": tokens()},
    "packed": packed,
    "padded": lambda: {"input_ids": tokens(), "attention_mask": padding("right")},
}


def compiled_calls() -> Iterator[Any]:
    """Every model with every call. Without --full, one model of each kind with one call; the calls take turns.

    Models of one kind have the same settings in `tiny_models`: they differ in what is not attention. The tests above
    compare each of them with eager attention. A trace takes over a second, so without --full not all models run.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, settings in DECODERS.items():
        kinds[str(settings)].append(name)
    for i, names in enumerate(kinds.values()):
        for j, name in enumerate(names):
            own = i % len(CALLS) if j == 0 else None
            for k, call in enumerate(CALLS):
                yield pytest.param(name, call, marks=[] if k == own else [pytest.mark.full])


FOLLOWS_ROWS = ("Llama4",)
"""Compiled, chunks of packed sequences follow the row, as in eager attention; otherwise each sequence begins one."""


@pytest.mark.parametrize(("name", "call"), list(compiled_calls()))
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_one_graph(name: str, call: str) -> None:
    alternates = DECODERS[name].keys() & {"layer_types", "no_rope_layers", "max_window_layers"}
    net = decoder(name, num_hidden_layers=2 if alternates else 1)
    inputs = CALLS[call]()
    net.set_attn_implementation("codegen")
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(net, fullgraph=True, backend="eager")(**inputs, use_cache=False).logits
        if call == "packed" and name in FOLLOWS_ROWS:
            net.set_attn_implementation("eager")
        assert_close(got, net(**inputs, use_cache=False).logits, "logits")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "given", "dynamic"),
    [
        ("Gemma2", {}, True),
        ("Llama", {"attention_dropout": 0.2}, None),
        # These two traces repeat parts of those above: floats that are no symbols, and dropout under symbols.
        pytest.param("Gemma2", {}, None, marks=pytest.mark.full),
        pytest.param("Llama", {"attention_dropout": 0.2}, True, marks=pytest.mark.full),
    ],
)
def test_compiled_models_have_caps_and_dropout(name: str, given: dict[str, Any], dynamic: bool | None) -> None:
    """With dynamic shapes the floats of a config are symbols of the trace. Seeds are drawn by the compiled model."""
    net = decoder(name, **given).train()
    net.set_attn_implementation("codegen")
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager", dynamic=dynamic)
    for length in (LENGTH, LENGTH + 3):
        results = []
        for run in (compiled, net):
            torch.manual_seed(0)
            logits = run(tokens(2, length), use_cache=False).logits
            results.append((logits.detach(), gradients(net, weighted(logits))))
        assert_same(*results)


@pytest.mark.filterwarnings("ignore")
def test_compiled_chunks_begin_with_the_sequences_of_a_collator() -> None:
    net = decoder("Llama4")
    want, _ = separate(net, packed())
    net.set_attn_implementation("codegen")
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(net, fullgraph=True, backend="eager")(**packed(), **boundaries(), use_cache=False).logits
    assert_close(got, want, "logits")
