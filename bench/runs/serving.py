"""Tokens per second of transformers' continuous batching, ours beside its own: `python -m bench.runs.serving`.

A model of the shape of Llama 3 8B with random weights answers requests of equal length, by default 64 requests of 2048
tokens, with 256 new tokens each. `codegen` is `paged|codegen`. `alibi` is the same model with linear biases, one slope
a head, which no server offers. `sdpa` and `eager` are transformers' own, with its defaults. Each serves some requests
first, so that kernels are compiled and graphs captured before the clock starts.

It needs transformers 5.17.0 beside torch and Triton. On a CPU, `--layers 1 --width 64` and small counts try it out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.record import prepare_file

IMPLEMENTATIONS = ("codegen", "alibi", "sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class Served:
    """The figures of one implementation: tokens per second, milliseconds to the first token and between tokens.

    `peak_gib` is its peak memory, the model's included. `note` is an error, and then there are no figures.
    """

    implementation: str
    seconds: float | None = None
    tokens_per_s: float | None = None
    first_ms: float | None = None
    between_mean_ms: float | None = None
    between_p50_ms: float | None = None
    between_p99_ms: float | None = None
    peak_gib: float | None = None
    note: str = ""


def llama(options: argparse.Namespace) -> Any:
    """A model with random weights."""
    import transformers

    heads = options.width // options.head_dim
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=options.head_dim,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    with torch.device("cuda" if cuda else "cpu"):
        model = transformers.LlamaForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.self_attn.slope = nn.Parameter(torch.rand(heads))
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def manager_of(model: Any, implementation: str, options: argparse.Namespace) -> Any:
    """A started manager of requests."""
    import transformers

    from generated.integrations import transformers_paged as served
    from generated.torch import alibi

    tokens = options.prompt + options.new
    greedy = transformers.GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        block_size=options.block_size,
        num_blocks=options.requests * -(-tokens // options.block_size) + 8,
        max_batch_tokens=options.eager_batch_tokens if implementation == "eager" else options.batch_tokens,
        max_requests_per_batch=options.requests,
        use_cuda_graph=False if options.no_graphs else None,
        use_async_batching=False if options.no_graphs else None,
    )
    if implementation in ("sdpa", "eager"):
        model.set_attn_implementation(f"paged|{implementation}")
        manager = model.init_continuous_batching(greedy, config)
    else:
        own: dict[str, Any] = {"slope": lambda layer: layer.slope}
        name = served.register("alibi", alibi, **own) if implementation == "alibi" else served.register()
        model.set_attn_implementation(name)
        manager = served.manager(model, greedy, config, most_tokens=tokens)
    manager.warmup()
    manager.start()
    return manager


def answer(manager: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[Any]:
    """The results of some requests, or RuntimeError with the first error of one."""
    ids = manager.add_requests(inputs=prompts, max_new_tokens=new_tokens, record_timestamps=True)
    found: dict[str, Any] = {}
    while len(found) < len(ids):
        result = manager.get_result(timeout=5)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            found[result.request_id] = result
        elif result is None and not manager.is_running():
            raise RuntimeError("the manager stopped")
    return [found[each] for each in ids]


def serve(model: Any, implementation: str, options: argparse.Namespace) -> Served:
    """Measure one implementation."""
    cuda = torch.cuda.is_available()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, options.vocabulary, (2, options.requests, options.prompt), generator=generator).tolist()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        manager = manager_of(model, implementation, options)
        try:
            answer(manager, prompts[0], min(options.new, 8))
            begin = time.perf_counter()
            results = answer(manager, prompts[1], options.new)
            seconds = time.perf_counter() - begin
        finally:
            manager.stop(block=True)
            manager.destroy()
    except (RuntimeError, MemoryError, ValueError) as error:
        return Served(implementation=implementation, note=str(error).splitlines()[0][:200])
    first = [1e3 * (each.timestamps[0] - each.created_time) for each in results]
    between = sorted(
        1e3 * (b - a) for each in results for a, b in zip(each.timestamps, each.timestamps[1:], strict=False)
    )
    return Served(
        implementation=implementation,
        seconds=seconds,
        tokens_per_s=sum(len(each.generated_tokens) for each in results) / seconds,
        first_ms=sum(first) / len(first),
        between_mean_ms=sum(between) / len(between),
        between_p50_ms=between[len(between) // 2],
        between_p99_ms=between[len(between) * 99 // 100],
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    )


def main() -> int:
    """Measure and print; returns 1 if one of the ops' own runs failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.runs.serving", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--implementations",
        default=",".join(IMPLEMENTATIONS),
        help=f"implementations to time (default: {','.join(IMPLEMENTATIONS)})",
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens per step (default: 4096)")
    parser.add_argument(
        "--eager-batch-tokens",
        type=int,
        default=256,
        help="most tokens per step of eager, which stores all scores (default: 256)",
    )
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    names = options.implementations.split(",")
    if unknown := set(names) - set(IMPLEMENTATIONS):
        parser.error(f"--implementations: expected some of {', '.join(IMPLEMENTATIONS)}, got {', '.join(unknown)}")
    if options.json is not None:
        try:
            prepare_file("--json", options.json)
        except ValueError as error:
            parser.error(str(error))
    model = llama(options)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}: {options.requests} requests of {options.prompt} tokens, {options.new} new ones each")
    print("implementation  tokens/s   seconds  first ms  between ms: mean     p50     p99   peak GiB")
    rows = []
    for name in names:
        row = serve(model, name, options)
        rows.append(row)
        if row.note:
            print(f"{name:14}  {row.note}")
            continue
        values = (row.tokens_per_s, row.seconds, row.first_ms, row.between_mean_ms, row.between_p50_ms)
        shown = zip((*values, row.between_p99_ms, row.peak_gib or 0.0), (10, 10, 10, 18, 8, 8, 11), strict=True)
        print(f"{name:14}" + "".join(f"{value or 0:{width}.1f}" for value, width in shown), flush=True)
    if options.json is not None:
        sizes = {key: value for key, value in vars(options).items() if key not in ("json", "implementations")}
        record = {"device": device, "sizes": sizes, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(row.note for row in rows if row.implementation in ("codegen", "alibi")))


if __name__ == "__main__":
    sys.exit(main())
