"""Calls from models of transformers: packing, padding, checkpoints, dtypes, images, and ops that users register."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated import torch as ops  # noqa: E402
from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from generated.integrations import transformers_calls as calls  # noqa: E402
from tests.support.tiny_models import decoder  # noqa: E402
from tests.support.tiny_runs import (  # noqa: E402
    FIRST,
    LENGTH,
    PADDED,
    assert_close,
    assert_same,
    boundaries,
    packed,
    results,
    separate,
    tokens,
)

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hf.register()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_packed_sequences_do_not_leak_with_a_cache(name: str) -> None:
    """With `use_cache=True`, the default of most configs, eager attention sees the sequence before."""
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_have_the_same_gradients(reentrant: bool) -> None:
    net = decoder("Gemma2")
    want = results(net, "codegen", packed())
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.train()
    assert_same(results(net, "codegen", packed()), want)


def test_schedules_are_made_once_per_forward_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    found: Any = vars(calls)["schedule"]

    def count(op: Any, cache: dict[Any, Any], *arguments: Any) -> Any:
        before = len(cache)
        blocks = found(op, cache, *arguments)
        made.extend([op.__name__] * (len(cache) - before))
        return blocks

    monkeypatch.setattr(calls, "schedule", count)
    net = decoder("Gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    net.set_attn_implementation("codegen")
    net(**packed())
    assert sorted(made) == ["causal", "window"]
    net(**packed(), **boundaries())
    assert sorted(made) == ["causal", "causal", "window", "window"]


def test_boundaries_written_in_place_are_read_again() -> None:
    """A CUDA graph writes in this way, because its inputs keep their addresses."""
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
    """Vision towers make such calls: new boundaries are read, and the number of kept ones is bounded."""
    from generated.integrations.transformers_sharing import _KEPT, _recent

    q, k, v = torch.randn(3, 1, 2, 12, 16)
    module = torch.nn.Module()
    for cut in range(1, 9):
        cu_seqlens = torch.tensor([0, cut, 12], dtype=torch.int32)
        o, _ = hf.attention(module, q, k, v, None, is_causal=False, cu_seq_lens_q=cu_seqlens)
        want = torch.nn.functional.scaled_dot_product_attention(q[..., :cut, :], k[..., :cut, :], v[..., :cut, :])
        assert_close(o[:, :cut].transpose(1, 2), want, "o")
    assert len(_recent) <= _KEPT


@pytest.mark.parametrize("window", [None, 4])
def test_more_keys_than_queries_in_packed_sequences_are_aligned_at_the_end(window: int | None) -> None:
    """As in flash attention: the last query of each sequence sees its last key."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    begins: dict[str, Any] = {
        name: torch.tensor(x, dtype=torch.int32)
        for name, x in (("cu_seq_lens_q", [0, 3, 5]), ("cu_seq_lens_k", [0, 7, 12]))
    }
    o, _ = hf.attention(torch.nn.Module(), q, k, v, None, sliding_window=window, **begins)
    for rows, keys in ((slice(0, 3), slice(0, 7)), (slice(3, 5), slice(7, 12))):
        parts = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        behind = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop)[:, None]
        behind = behind[-1, -1] - behind
        keep = (behind >= 0) & (behind < (window or LENGTH))
        alone = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=keep)
        assert_close(o[:, rows].transpose(1, 2), alone, "o")
    bias = torch.zeros(1, 2, 5, 12)
    with pytest.raises(ArgumentError, match="cu_seq_lens_q: expected as many queries as keys beside images"):
        hf.attention(torch.nn.Module(), q, k, v, None, position_bias=bias, **begins)


@pytest.mark.parametrize("cached", ["static", "continued"])
def test_positions_that_restart_beside_other_keys_are_refused(cached: str) -> None:
    """Keys of unwritten places and of earlier calls: nothing says which sequences they are of."""
    net = decoder("Llama")
    net.set_attn_implementation("codegen")
    inputs = packed()
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    cache: Any = transformers.DynamicCache()
    if cached == "static":
        cache = transformers.StaticCache(config=net.config, max_cache_len=ids.shape[1] + 4)
    with torch.no_grad():
        if cached == "continued":
            net(input_ids=ids[:, :3], position_ids=positions[:, :3], past_key_values=cache)
            ids, positions = ids[:, 3:], positions[:, 3:]
        with pytest.raises(ArgumentError, match="position_ids: expected positions that go on"):
            net(input_ids=ids, position_ids=positions, past_key_values=cache)


def test_norms_in_float32_beside_values_in_bfloat16() -> None:
    """PEFT leaves q and k in float32 and v in bfloat16."""
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    o, _ = hf.attention(module, q, k, v.bfloat16(), None)
    assert o.dtype == torch.bfloat16
    want, _ = hf.attention(module, q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert torch.equal(o, want)


def test_autocast_decides_what_norms_in_float32_become() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = hf.attention(torch.nn.Module(), q, k, v.bfloat16(), None)
    want, _ = hf.attention(torch.nn.Module(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert torch.equal(o, want)


def test_images_see_themselves_whole() -> None:
    """The mask of Gemma 3 with images, which transformers makes by an overlay on its own mask."""
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
        # Positions are only for the rotary embedding here; they would give the same documents as `doc`.
        logits = net(input_ids=tokens(1), position_ids=positions, doc=doc).logits
    assert_close(logits, want, "logits")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sdpa", {}, "register: name: expected a name that transformers does not use itself, got 'sdpa'"),
        ("own", {"tensors": {"doc": 1}}, "register: tensors: expected None without op"),
        (
            "own",
            {"op": ops.alibi, "tensors": {"slop": 1}},
            "register: tensors: expected arguments of alibi, got 'slop'",
        ),
    ],
)
def test_bad_registrations_are_one_error(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hf.register(name, **given)


def test_dropout_of_a_model_whose_op_has_none_is_one_error() -> None:
    net = decoder("Llama", attention_dropout=0.1).train()
    hf.register("no_dropout", op=ops.causal)
    net.set_attn_implementation("no_dropout")
    with pytest.raises(ArgumentError, match=r"dropout: expected 0, as causal has none: .*, got 0\.1"):
        net(tokens())
    net.eval()(tokens())


def test_drafted_tokens_on_a_sliding_cache_do_not_change_what_is_generated() -> None:
    """A cache that was cropped counts its tokens in a tensor, which it changes before the layers read the mask."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=6, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    hf.register()
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="codegen").eval()
    ids = torch.randint(3, 30, (1, 17))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(ids, **call, prompt_lookup_num_tokens=3), model.generate(ids, **call))


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_chunks_on_a_cache_that_has_dropped_a_part_of_one(cache: str) -> None:
    net = decoder("Llama4").eval()
    size = {"max_cache_len": LENGTH} if cache == "StaticCache" else {}
    logits = []
    with torch.no_grad():
        want = net(tokens(), use_cache=False).logits
        net.set_attn_implementation("codegen")
        keys = getattr(transformers, cache)(config=net.config, **size)
        for part in tokens().split([13, 7, 1, 3], 1):
            logits.append(net(part, past_key_values=keys).logits)
    assert_close(torch.cat(logits, 1), want, "logits")


@pytest.mark.filterwarnings("ignore")
# Llama's layers are among those of Llama 4, which also has chunked ones.
@pytest.mark.parametrize("name", [pytest.param("Llama", marks=pytest.mark.full), "Llama4"])
def test_compiled_decoding_on_a_static_cache(name: str) -> None:
    """The cache counts its tokens in a tensor, which the first layer changes after the mask was made from it."""
    net = decoder(name)
    with torch.no_grad():
        want = net(tokens(), use_cache=False).logits
        net.set_attn_implementation("codegen")
        torch.compiler.reset()
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        keys = transformers.StaticCache(config=net.config, max_cache_len=LENGTH + 4)
        logits, begin = [], 0
        for part in tokens().split([LENGTH - 5, 1, 3, 1], 1):
            run = compiled if begin else net
            positions = torch.arange(begin, begin + part.shape[1])[None]
            logits.append(run(input_ids=part, position_ids=positions, past_key_values=keys).logits)
            begin += part.shape[1]
    assert_close(torch.cat(logits, 1), want, "logits")
