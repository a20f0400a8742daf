"""transformers' continuous batching on the ops: tiny random models on the CPU generate eager attention's tokens."""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generated.integrations.entries import Attention, entry
from generated.torch import alibi, causal
from tests.support.rendering import importable

transformers: Any = pytest.importorskip("transformers", reason="continuous batching is transformers'")
served: Any = importlib.import_module("generated.integrations.transformers_paged")

NEW_TOKENS = 10
LENGTHS = (5, 37, 70, 130)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # With tied embeddings a random model repeats the last token.
    "tie_word_embeddings": False,
    # Large, so that scores reach softcaps, and attention decides which token comes next.
    "initializer_range": 0.5,
}
WINDOW = 20


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gemma2() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, layer_types=kinds, attn_logit_softcapping=1.0, query_pre_attn_scalar=16
    )
    return transformers.Gemma2ForCausalLM(config)


def exaone4() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(**SIZES, sliding_window=WINDOW, layer_types=kinds)
    )


def gpt_oss() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.GptOssConfig(
        **SIZES, sliding_window=WINDOW, layer_types=kinds, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config)


def llama_alibi() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.slope = nn.Parameter(torch.rand(SIZES["num_attention_heads"]))
    return model


def drawn(make: Callable[[], Any], implementation: str) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation(implementation)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def served_tokens(
    model: Any,
    *,
    most_tokens: int | None = None,
    batch_tokens: int = 96,
    asked: list[list[int]] | None = None,
    by: Any = served,
) -> list[list[int]]:
    """The tokens that continuous batching generates. `batch_tokens` per step cut the longer prompts into chunks."""
    asked = prompts() if asked is None else asked
    greedy = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        block_size=32, num_blocks=64, max_batch_tokens=batch_tokens, max_memory_percent=0.3
    )
    if model.config._attn_implementation in ("paged|eager", "paged|sdpa"):
        manager = model.init_continuous_batching(greedy, config)
    else:
        manager = by.manager(model, greedy, config, most_tokens=most_tokens)
    manager.start()
    try:
        ids = manager.add_requests(inputs=asked, max_new_tokens=NEW_TOKENS)
        found: dict[str, Any] = {}
        end = time.monotonic() + 120
        while len(found) < len(ids) and time.monotonic() < end and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result
    finally:
        manager.stop(block=True)
        manager.destroy()
    assert not [found[each].error for each in ids if found[each].error]
    return [found[each].generated_tokens for each in ids]


def alone(model: Any) -> list[list[int]]:
    """The tokens that continue each prompt alone, without any cache."""
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def count_steps(patch: pytest.MonkeyPatch, module: Any = served) -> Counter[str]:
    """How often each kind of step is served from now on; each layer counts."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> None:
        method = getattr(module.Tokens, name)

        def call(self: Any, *args: Any) -> Tensor:
            counted[name] += 1
            found: Tensor = method(self, *args)
            return found

        patch.setattr(module.Tokens, name, call)

    for name in ("decode", "mixed", "next_in_ring", "first", "packed"):
        counting(name)
    return counted


# -------------------------------------------------------------------------------------------------------------- models


def test_llama_in_every_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count_steps(monkeypatch)
    want = served_tokens(drawn(llama, "paged|eager"))
    model = drawn(llama, served.register())
    assert served_tokens(model) == want
    assert steps["first"]
    assert steps["mixed"]
    assert not steps["decode"]
    assert served_tokens(model, most_tokens=150) == want
    assert steps["decode"]
    assert served_tokens(model, most_tokens=150, batch_tokens=512) == want


def test_prompts_that_share_a_prefix() -> None:
    asked = [[*prompts()[3], *each] for each in prompts((3, 9, 40))]
    want = served_tokens(drawn(llama, "paged|eager"), asked=asked)
    assert served_tokens(drawn(llama, served.register()), asked=asked, most_tokens=256) == want


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The integration of a package with the entries that errors propose."""
    kinds = [
        Attention(before=before, after=0, cap=cap, sink=sink)
        for before, cap, sink in ((None, 1.0, False), (9, 1.0, False), (None, None, True), (9, None, True))
    ]
    spec = "variants:\n" + "".join(entry(each).removeprefix("variants:\n") + "\n" for each in kinds)
    with importable(tmp_path_factory.mktemp("package"), "served_variants", spec) as folder:
        yield importlib.import_module(f"{folder.name}.integrations.transformers_paged")


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_sliding_layers_softcaps_and_sinks(
    make: Callable[[], Any], package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_steps(monkeypatch, package)
    want = alone(drawn(make, "eager"))
    model = drawn(make, package.register("of_package"))
    assert served_tokens(model, by=package, most_tokens=150) == want
    assert served_tokens(model, by=package, batch_tokens=32) == want
    # Half of the layers have a window: chunks gather its keys from the ring, single tokens read the ring.
    assert steps["packed"] > steps["first"] > 0
    assert steps["mixed"] > steps["next_in_ring"] > 0
    assert not steps["decode"]


def test_full_layers_that_hold_the_size_of_the_window() -> None:
    """In EXAONE 4 all layers have the attribute `sliding_window`; only sliding layers pass it on."""
    want = alone(drawn(exaone4, "eager"))
    assert served_tokens(drawn(exaone4, served.register())) == want


def plain_alibi(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, scaling: float, **__: Any) -> Any:
    """Attention with linear biases by its formula, on q `[B, Hq, S, D]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
    score = scaling * query @ key.transpose(2, 3) + module.slope[:, None, None] * distance
    weights = score.masked_fill(distance > 0, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def test_a_variant_with_a_learned_tensor() -> None:
    transformers.AttentionInterface.register("plain_alibi", plain_alibi)
    want = alone(drawn(llama_alibi, "plain_alibi"))
    model = drawn(llama_alibi, served.register("alibi", alibi, slope=lambda layer: layer.slope))
    assert served_tokens(model, most_tokens=150) == want
    assert served_tokens(model) == want
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.slope)
    assert served_tokens(model) != want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are replayed, and steps overlap, on a GPU alone")
@pytest.mark.parametrize("most_tokens", [150, None], ids=["block table", "slots"])
@pytest.mark.parametrize("make", [llama, gemma2, gpt_oss])
def test_graphs_and_asynchronous_steps(make: Callable[[], Any], most_tokens: int | None, package: Any) -> None:
    """Served tokens are the likeliest ones of eager attention without a cache, up to rounding."""
    package.register("of_package")
    served.register()
    name, by = ("paged|codegen", served) if make is llama else ("paged|of_package", package)
    model = drawn(make, name).cuda()
    if make is gpt_oss:
        model.set_experts_implementation("batched_mm")  # the default one copies from the CPU, which no graph captures
    tokens = served_tokens(model, by=by, most_tokens=most_tokens)
    model.set_attn_implementation("eager")
    for prompt, found in zip(prompts(), tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *found[:-1]]]).cuda(), use_cache=False).logits[0, len(prompt) - 1 :]
        miss = logits.amax(-1) - logits.gather(1, torch.tensor(found).cuda()[:, None])[:, 0]
        assert (miss / logits.std(-1)).max() < 0.05


# --------------------------------------------------------------------------------------------------------------- plans


def counted(op: Any) -> tuple[Any, Counter[str]]:
    """An op that counts its calls, plans and schedules."""
    number: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            number[name] += 1
            return function(*args, **kwargs)

        return call

    found = counting("calls", op)
    found.plan, found.schedule = counting("plans", op.plan), counting("schedules", op.schedule)
    return found, number


def test_layers_share_the_plan_of_a_step() -> None:
    op, number = counted(causal)
    served_tokens(drawn(llama, served.register("counted", op)), most_tokens=150)
    assert number["plans"] > number["schedules"] > 0
    assert number["calls"] == SIZES["num_hidden_layers"] * (number["plans"] + number["schedules"])


class Cache:
    """The part of transformers' cache that an attention function reads: one layer, 4 blocks of 16 tokens."""

    block_size = 16

    def __init__(self) -> None:
        self.layer_index_to_group_indices = {0: (0, 0)}
        self.sliding_windows = {0: 1}
        self.key_cache, self.value_cache = [torch.zeros(64, 2, 16)], [torch.zeros(64, 2, 16)]


class Layer(nn.Module):
    layer_idx = 0


def call(name: str, held: Cache, lengths: Tensor, **others: Any) -> Tensor:
    """A step of one token per sequence, with a block table."""
    count = len(lengths)
    attend = transformers.AttentionInterface()[name]
    kwargs: dict[str, Any] = {
        "attention_mask": None,
        "scaling": 0.25,
        "cache": held,
        "cu_seq_lens_q": torch.arange(count + 1, dtype=torch.int32),
        "cu_seq_lens_k": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        "max_seqlen_q": 1,
        "block_table": torch.arange(count, dtype=torch.int32).view(1, count, 1),
        "read_index": [torch.zeros(0, dtype=torch.int64)],
        "write_index": [torch.full((count,), 63)],
    }
    q, k, v = torch.randn(1, 6, count, 16), *torch.randn(2, 1, 2, count, 16)
    o, weights = attend(others.pop("module", Layer()), q, k, v, **kwargs | others)
    assert weights is None
    found: Tensor = o
    return found


def test_rows_that_pad_a_graph_write_nothing() -> None:
    name, cache = served.register(), Cache()
    o = call(name, cache, torch.tensor([3, 0, 1]))
    written = cache.key_cache[0].abs().sum((1, 2)).nonzero().flatten()
    assert o.shape == (1, 3, 6, 16)
    assert not o[:, 1].any()
    assert written.tolist() == [2, 32]


def test_a_second_pass_with_the_same_tensors_makes_its_own_plan() -> None:
    op, number = counted(causal)
    name, cache, lengths = served.register("counted", op), Cache(), torch.tensor([3, 1])
    begins = torch.arange(3, dtype=torch.int32)
    for _ in range(2):
        call(name, cache, lengths, cu_seq_lens_q=begins)
    assert number["plans"] == 2


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"cache": None}, "cache: expected the cache of continuous batching"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask: expected None"),
        ({"dropout": 0.1}, "dropout: expected 0 in serving"),
        ({"output_attentions": True}, "output_attentions: expected False"),
        ({"is_causal": False}, "is_causal: expected a causal model"),
        ({"sliding_window": 1}, "sliding_window: expected 2 or more"),
        ({"block_indices": torch.zeros(1)}, "block_indices: expected None: no op reads"),
        ({"position_bias": torch.zeros(1)}, "position_bias: expected None, or a registered op"),
    ],
)
def test_what_cannot_be_served_is_refused(others: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"paged\|codegen: .*{error}"):
        call(served.register(), Cache(), torch.tensor([3, 1]), **others)


def test_a_variant_that_is_not_rendered_is_refused_with_its_entry() -> None:
    with pytest.raises(NotImplementedError, match=r"capped at 30.0, sinks. Add an entry(.|\n)*sink: true"):
        call(served.register(), Cache(), torch.tensor([3, 1]), softcap=30.0, s_aux=torch.zeros(6))


def test_an_op_that_would_drop_what_the_model_passes_is_refused() -> None:
    cache, lengths = Cache(), torch.tensor([3, 1])
    with pytest.raises(ValueError, match=r"paged\|plain: softcap: expected causal to read it"):
        call(served.register("plain", causal), cache, lengths, softcap=30.0)
    call(served.register("plain", causal, ignore=("softcap",)), cache, lengths, softcap=30.0)
    with pytest.raises(ValueError, match=r"paged\|biased: slope: expected a model that passes 'slopes'"):
        call(served.register("biased", alibi, slope="slopes"), cache, lengths)


def test_bad_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    for args, kwargs, error in (
        (("a|b",), {}, "register: name: expected a name without"),
        (("x", torch.softmax), {}, "register: op: expected a torch op"),
        (("x", causal), {"slope": 1}, "register: slope: expected an argument of causal"),
        (("x", causal), {"scale": 1.0}, "register: scale: expected a tensor or scalar of causal's own"),
        (("x",), {"slope": 1}, "register: slope: expected an op beside"),
        (("x",), {"splits": "even"}, "register: splits: expected None, 'balanced'"),
        (("x", causal), {"ignore": ("scale",)}, "register: ignore: expected some of softcap"),
    ):
        with pytest.raises(ValueError, match=error):
            served.register(*args, **kwargs)
    with pytest.raises(ValueError, match="manager: model: expected a model with set_attn_implementation"):
        served.manager(drawn(llama, "sdpa"))
    monkeypatch.setattr(transformers, "__version__", "5.18.1")
    with pytest.raises(ImportError, match=r"transformers 5.18.1: .* tested with 5.17 up to"):
        served.register()
