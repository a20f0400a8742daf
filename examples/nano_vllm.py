"""nano-vllm on the ops of this package: `python -m examples.nano_vllm`.

nano-vllm (github.com/GeeeekExplorer/nano-vllm) serves Qwen3 with paged caches, a prefix cache and CUDA graphs. For
attention it imports two functions of the package `flash_attn`; `examples/engine_calls.py` computes both by an op.

The script first calls both with arguments as nano-vllm makes them, and compares the results with the formula in
float64. On a GPU with `pip install nano-vllm-fork==20260210` it then serves a Qwen3 with random weights; `--full` takes
the shape of Qwen3 0.6B. It prints tokens per second, and computes some sequences again with transformers' attention.

The exit status is 1 if a result differs by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from examples.engine_calls import FlashAttentionCalls, formula
from generated.torch import causal

HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 256
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error relative to the largest element."""

LIKELIHOOD_BOUND = 2.0
"""A served token's logit lies below the largest logit by some distance. This distance may be at most so many times that
of the token that transformers itself chooses in bfloat16. All logits are computed in float32."""


# ------------------------------------------------------------------------------------------------------- the functions


def check_functions(calls: FlashAttentionCalls, device: str) -> float:
    """The largest error of both functions: on prompts, on prompts with a cached prefix, and on decoding sequences."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    scale, lengths, cached = DIM**-0.5, (300, 1, 40, 0), (256, 0, 0, 0)
    # Cache blocks that belong to no sequence hold NaN, and rows of the table are padded with -1.
    k_cache, v_cache = torch.full((2, 8, BLOCK, KV_HEADS, DIM), float("nan"), dtype=dtype, device=device)
    table = torch.tensor([[5, 2], [1, -1], [7, -1], [-1, -1]], dtype=torch.int32, device=device)
    keys, values = [], []
    for row, length in zip(table.tolist(), lengths, strict=True):
        k, v = torch.randn(2, length, KV_HEADS, DIM, device=device).to(dtype)
        for first in range(0, length, BLOCK):
            k_cache[row[first // BLOCK], : min(BLOCK, length - first)] = k[first : first + BLOCK]
            v_cache[row[first // BLOCK], : min(BLOCK, length - first)] = v[first : first + BLOCK]
        keys.append(k)
        values.append(v)

    def begins(counts: list[int]) -> Tensor:
        return torch.tensor([0, *counts], device=device).cumsum(0).int()

    def error(got: Tensor, queries: list[Tensor]) -> float:
        want = torch.cat([formula(q, k, v, scale) for q, k, v in zip(queries, keys, values, strict=True) if len(k)])
        return ((got[: len(want)].double() - want).abs().max() / want.abs().max()).item()

    def drawn(counts: list[int]) -> list[Tensor]:
        return [torch.randn(n, HEADS, DIM, device=device).to(dtype) for n in counts]

    found = {}
    for name, past in (("prompts", [0] * 4), ("prefix cache", list(cached))):
        counts = [n - old for n, old in zip(lengths, past, strict=True)]
        queries = drawn(counts)
        behind = past != [0] * 4
        o = calls.flash_attn_varlen_func(
            torch.cat(queries),
            k_cache if behind else torch.cat(keys),
            v_cache if behind else torch.cat(values),
            max_seqlen_q=max(counts),
            cu_seqlens_q=begins(counts),
            max_seqlen_k=max(lengths),
            cu_seqlens_k=begins(list(lengths)),
            softmax_scale=scale,
            causal=True,
            block_table=table if behind else None,
        )
        found[name] = error(o, queries)
    # As in a CUDA graph: the last row pads the batch, its length is 0.
    queries = drawn([1] * 4)
    o = calls.flash_attn_with_kvcache(
        torch.cat(queries)[:, None],
        k_cache,
        v_cache,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table,
        softmax_scale=scale,
        causal=True,
    )
    found["decoding"] = error(o[:, 0], queries)
    print(f"Errors against the formula in float64, {dtype} on {device}:")
    for name, value in found.items():
        print(f"  {name:13} {value:.1e}")
    return max(found.values())


# ---------------------------------------------------------------------------------------------------------- the engine


@contextmanager
def nanovllm(calls: FlashAttentionCalls) -> Iterator[ModuleType]:
    """nano-vllm with these functions inside the `with` block. Its modules are imported anew, and dropped at the end.

    transformers 5 gives every configuration a `rope_scaling`, which nano-vllm takes for an unknown kind of scaling. So
    nano-vllm gets the configuration without it.
    """
    before = {name: module for name, module in sys.modules.items() if _is_theirs(name)}
    for name in before:
        del sys.modules[name]
    shim: Any = ModuleType("flash_attn")
    shim.flash_attn_varlen_func = calls.flash_attn_varlen_func
    shim.flash_attn_with_kvcache = calls.flash_attn_with_kvcache
    sys.modules["flash_attn"] = shim
    try:
        engine = importlib.import_module("nanovllm")
        config: Any = importlib.import_module("nanovllm.config")
        config.AutoConfig = SimpleNamespace(from_pretrained=_without_scaling(config.AutoConfig))
        yield engine
    finally:
        for name in [name for name in sys.modules if _is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in ("flash_attn", "nanovllm")


def _without_scaling(automatic: Any) -> Any:
    def from_pretrained(path: str) -> SimpleNamespace:
        found = automatic.from_pretrained(path)
        return SimpleNamespace(**(found.to_dict() | {"rope_scaling": None, "dtype": found.dtype}))

    return from_pretrained


def serve(calls: FlashAttentionCalls, full: bool) -> bool:
    """Serve random prompts; returns whether the served tokens are about as likely as those of transformers itself."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    count, longest, new_tokens = (64, 2048, 256) if full else (8, 600, 16)
    config = Qwen3Config(
        vocab_size=151936 if full else 1024,
        hidden_size=1024 if full else 256,
        intermediate_size=3072 if full else 512,
        num_hidden_layers=28 if full else 2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=4096,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    reference: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    lengths = torch.randint(longest // 4, longest, (count,)).tolist()
    shared = torch.randint(config.vocab_size, (longest // 4,)).tolist()
    # Every second prompt begins with the same tokens, for the prefix cache.
    prompts = [
        (shared if i % 2 else []) + torch.randint(config.vocab_size, (n,)).tolist() for i, n in enumerate(lengths)
    ]
    with tempfile.TemporaryDirectory() as folder, nanovllm(calls) as engine:
        reference.save_pretrained(folder)
        tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda _: "")
        llm = engine.LLM(folder, tokenizer=tokenizer, max_num_seqs=count, gpu_memory_utilization=0.6)
        # Almost greedy, because nano-vllm always samples.
        sampling = engine.SamplingParams(temperature=1e-4, max_tokens=new_tokens, ignore_eos=True)
        llm.generate(prompts[:2], sampling, use_tqdm=False)
        begin = time.perf_counter()
        answers = [each["token_ids"] for each in llm.generate(prompts, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - begin
    print(f"nano-vllm: {count * new_tokens / seconds:.1f} tokens/s, {count} requests in {seconds:.2f} s")
    served_miss = own_miss = 0.0
    precise: Any = Qwen3ForCausalLM(config).float().eval()
    precise.load_state_dict({name: x.float() for name, x in reference.state_dict().items()})
    reference, precise = reference.cuda(), precise.cuda()
    for prompt, answer in list(zip(prompts, answers, strict=True))[:4]:
        tokens = torch.tensor([[*prompt, *answer[:-1]]]).cuda()
        with torch.no_grad():
            logits, rounded = (model(tokens).logits[0, len(prompt) - 1 :] for model in (precise, reference))
        served_miss = max(served_miss, miss(logits, torch.tensor(answer).cuda()))
        own_miss = max(own_miss, miss(logits, rounded.argmax(-1)))
    print("How far the logit of a chosen token lies below the largest one, both computed in float32, at most,")
    print(
        f"in standard deviations of the logits: nano-vllm {served_miss:.1e}, transformers in bfloat16 {own_miss:.1e}."
    )
    return served_miss <= LIKELIHOOD_BOUND * own_miss


def miss(logits: Tensor, tokens: Tensor) -> float:
    """The largest distance of a token's logit below the largest of its row, in standard deviations of the row."""
    below = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]
    return float((below / logits.std(-1)).max())


def main() -> int:
    """Check both functions, and serve if that is possible; returns 0 if all results are right."""
    parser = argparse.ArgumentParser(prog="python -m examples.nano_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="serve a model of the size of Qwen3 0.6B, with 64 requests")
    full: bool = parser.parse_args().full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = FlashAttentionCalls(causal)
    right = check_functions(calls, device) <= BOUND[torch.bfloat16 if device == "cuda" else torch.float32]
    if device == "cpu" or importlib.util.find_spec("nanovllm") is None:
        print("nano-vllm does not serve: it needs a GPU and `pip install nano-vllm-fork==20260210`.")
    else:
        right = serve(calls, full) and right
    print("All is well." if right else "FAILED: a result differs by more than rounding.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
