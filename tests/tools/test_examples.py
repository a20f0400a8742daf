"""The examples run on a CPU by the commands in their first lines, and end with their results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from examples.serving_model import OWN, Model, Size
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(INTERPRET, reason="each example runs in a process of its own, which chooses for itself")

EXAMPLES = {
    "paper_to_training": ("dr2  error", "with the bias,"),
    "from_flexattention": ("computes the same: yes", "of the largest element (bound 2e-05)"),
    "flax_recipes": ("linen  losses", "nnx    losses"),
    "forgetting_attention": ("generated  o ", "dg "),
    "packed_documents_jax": ("segment ids ", "cu_seqlens ", "document mask "),
    "image_tiles": ("rows   20%", "tiles  38%"),
    "minivllm": ("prefill 128", "decode B4 S2048"),
    "nano_vllm": ("prefix cache", "decoding", "nano-vllm does not serve:"),
    "serve": ("tokens/s", "first token", "between tokens"),
    "train_parallel": ("2 ranks, 250 rows", "largest difference"),
    "sft_trl": ("packed they are", "without where documents begin"),
    "trainer_fsdp2": ("2 ranks, each with", "largest difference"),
    "plain_triton": ("Triton     error", "Not through jax-triton:"),
}
"""Example -> texts that it prints if it runs to its end."""

# TRL is in no extra: with pyarrow and pandas it brings 300 MB.
NEEDS = {
    "flax_recipes": "flax",
    "packed_documents_jax": "jax",
    "plain_triton": "triton",
    "sft_trl": "trl",
    "trainer_fsdp2": "transformers",
}


# Three processes that import transformers take a fifth of this file's time. `train_parallel` has processes too, and
# test_parallel_processes.py trains a model that FSDP2 shards.
ONLY_IN_FULL = ("trainer_fsdp2",)


@pytest.mark.parametrize(
    "example", [pytest.param(x, marks=[pytest.mark.full] if x in ONLY_IN_FULL else []) for x in EXAMPLES]
)
def test_an_example_runs_on_the_cpu(example: str) -> None:
    if example in NEEDS:
        pytest.importorskip(NEEDS[example], reason=f"the example is one of {NEEDS[example]}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All is well" in done.stdout
    assert [line for line in EXAMPLES[example] if line not in done.stdout] == []


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ("image_tiles", ["--head-dim", "0"], "argument --head-dim: expected an integer of at least 8, got '0'"),
        ("minivllm", ["--source", "nowhere"], "error: --source: expected a folder with src/myvllm, got nowhere"),
        ("serve", ["--page-size", "0"], "argument --page-size: expected an integer of at least 1, got '0'"),
        ("sft_trl", ["--steps", "1"], "argument --steps: expected an integer of at least 2, got '1'"),
        ("train_parallel", ["--ranks", "0"], "argument --ranks: expected an integer of at least 1, got '0'"),
        ("trainer_fsdp2", ["--ranks", "-1"], "argument --ranks: expected an integer of at least 1, got '-1'"),
    ],
)
def test_a_bad_option_is_one_error(
    example: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [example, *options])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"examples.{example}").main()
    assert capsys.readouterr().err.rstrip().endswith(message)


@pytest.mark.parametrize("variant", sorted(OWN))
def test_any_variant_is_served(variant: str) -> None:
    """Prompts in chunks next to decoding sequences, more requests than run at once, and pages that are used again."""
    from examples.serve import Request, Server, drawn_requests, largest_miss

    torch.manual_seed(0)
    size = Size(layers=2, heads=6, kv_heads=2, head_dim=8, width=48, inner=48, vocabulary=64, longest=64)
    model = Model(size, variant)
    server = Server(model, pages=20, page_size=8, longest=48, batch_tokens=24, most_running=3, graphs=False)
    requests = drawn_requests(5, 40, 6, size.vocabulary)
    for request in requests:
        server.add(request)
    assert len(server.run()) == 5
    assert {len(request.generated) for request in requests} == {6}
    assert server.pool.free_pages == 20
    assert min(server.mixed_steps, server.decode_steps) > 0
    assert largest_miss(model, requests) < 1e-3
    with pytest.raises(MemoryError, match="expected a request of at most 6 pages, got one of 7"):
        server.add(Request([1] * 50, 6))


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 3), ([1, 2], 0)])
def test_a_request_without_tokens_is_refused(prompt: list[int], new_tokens: int) -> None:
    from examples.serve import TINY, Request, Server

    server = Server(
        Model(TINY, "causal"), pages=4, page_size=8, longest=32, batch_tokens=8, most_running=2, graphs=False
    )
    with pytest.raises(ValueError, match="expected a prompt of at least one token, and at least one new token"):
        server.add(Request(prompt, new_tokens))
    assert server.run() == []


def test_a_request_is_served_once() -> None:
    from examples.serve import TINY, Request, Server

    def server(**given: int) -> Server:
        sizes = {"pages": 4, "page_size": 8, "longest": 32, "batch_tokens": 8, "most_running": 2}
        return Server(Model(TINY, "causal"), **sizes | given, graphs=False)

    request, first = Request([1, 2, 3], 2), server()
    first.add(request)
    with pytest.raises(ValueError, match="expected a request that was not added before"):
        first.add(request)
    assert first.run() == [request]
    with pytest.raises(ValueError, match="expected a request that was not added before"):
        server().add(request)
    for none in ("batch_tokens", "most_running"):
        with pytest.raises(ValueError, match="batch_tokens and most_running: expected at least 1 each, got"):
            server(**{none: 0})


def test_a_kernel_compiles_through_jax_triton() -> None:
    """Lowering needs no GPU: the custom call holds the machine code."""
    reason = "jax-triton is an optional extra, and imports only beside JAX's CUDA plugin"
    jax_triton = pytest.importorskip("jax_triton", reason=reason, exc_type=ImportError)
    import jax
    import jax.numpy as jnp

    from examples.plain_triton import from_jax_triton

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        return from_jax_triton(jax_triton, q, k, v, compute_capability=90)

    q, k = jnp.zeros((1, 4, 150, 32)), jnp.zeros((1, 2, 150, 32))
    o, lse = jax.eval_shape(call, q, k, k)
    assert (o.shape, lse.shape) == ((1, 4, 150, 32), (1, 4, 150))
    text = jax.jit(call).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.custom_call @triton_kernel_call" in text
