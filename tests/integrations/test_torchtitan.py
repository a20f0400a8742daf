"""`generated.integrations.torchtitan` in torchtitan's models, on the CPU: torchtitan 0.3.0 with spmd_types 0.2.3."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan", reason="torchtitan and its spmd_types are not in an extra: its trainer needs a lot")
pytest.importorskip("tyro", reason="torchtitan's configs import it")

from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    VarlenMetadata,
    create_varlen_metadata_for_document,
)
from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale
from torchtitan.models.llama3 import _debugmodel
from torchtitan.protocols.module import Module

from generated import torch as ops
from generated._runtime.core.checks import ArgumentError
from generated.integrations import torchtitan as integration
from generated.integrations.torchtitan import CodegenAttention, with_codegen

B, L, N, K, H = 2, 24, 4, 2, 16
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
"""float32: sums of at most 24 terms around 1, rounded in another order."""
POSITIONS = torch.cat([torch.arange(n) for n in (10, 14, 24)]).view(B, L)


def drawn() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, L, heads, H, requires_grad=True) for heads in (N, K, K)]


def plain(*given: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """o and lse of causal attention within documents, computed with the whole matrix of scores."""
    q, k, v, positions = given
    t = torch.arange(q.shape[1])
    doc = (positions == 0).cumsum(1)
    keep = (t[:, None] >= t) & (doc[:, :, None] == doc[:, None, :])
    keep &= True if window is None else t[:, None] - t <= window
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    score = score.masked_fill(~keep[:, None], float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v), score.logsumexp(-1).transpose(1, 2)


def check(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, **CLOSE)
    weights = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", ["metadata", "positions", "rows"])
def test_documents_and_windows(documents: str, window: int | None) -> None:
    inputs = drawn()
    positions = torch.arange(L).expand(B, L) if documents == "rows" else POSITIONS
    masks = {"metadata": create_varlen_metadata_for_document(positions), "positions": positions, "rows": None}[
        documents
    ]
    module = CodegenAttention.Config(window_size=(-1 if window is None else window, 0)).build()
    check(module(*inputs, attention_masks=masks, enable_gqa=True), plain(*inputs, positions, window=window)[0], inputs)


def test_a_batch_folded_into_one_row_of_tokens() -> None:
    """Revisions after 0.3.0 pass q, k and v without a batch axis."""
    inputs = drawn()
    module = CodegenAttention.Config(window_size=(5, 0)).build()
    given: dict[str, Any] = {"out_transform": lambda o, lse: o + lse[..., None]}
    masks = create_varlen_metadata_for_document(POSITIONS)
    want = module(*inputs, attention_masks=masks, **given)
    got = module(*(x.flatten(0, 1) for x in inputs), attention_masks=masks, **given)
    assert got.shape == (B * L, N, H)
    torch.testing.assert_close(got.unflatten(0, (B, L)), want, rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=r"attention_masks: expected VarlenMetadata beside tensors \[T, N, H\]"):
        module(*(x.flatten(0, 1) for x in inputs))


@pytest.mark.parametrize("masks", [create_varlen_metadata_for_document(POSITIONS), POSITIONS], ids=["metadata", "rows"])
def test_sinks_by_lse(masks: Any) -> None:
    """gpt-oss's layers call it in this way; the variant with sinks computes the same."""
    inputs = [*drawn(), torch.randn(N, requires_grad=True)]
    *qkv, sinks = inputs

    def rescaled(o: Tensor, lse: Tensor) -> Tensor:
        scaled: Tensor = apply_attention_sink_rescale(o, lse, sinks)
        return scaled

    module = CodegenAttention.Config(window_size=(127, 0)).build()
    got = module(*qkv, attention_masks=masks, out_transform=rescaled)
    check(got, rescaled(*plain(*qkv, POSITIONS)), inputs)
    own = CodegenAttention.Config(variant="gpt_oss", tensors={"sink": lambda module, batch: sinks}).build()
    torch.testing.assert_close(own(*qkv, attention_masks=masks), got, **CLOSE)


@pytest.mark.parametrize("masks", [create_varlen_metadata_for_document(POSITIONS), POSITIONS], ids=["metadata", "rows"])
def test_positions_of_a_variant_begin_with_a_document(masks: Any) -> None:
    inputs = drawn()
    module = CodegenAttention.Config(variant="chunked", scalars={"size": 6}).build()
    chunks = torch.where(POSITIONS % 6 == 0, 0, 1)  # 0 where a chunk begins
    check(module(*inputs, attention_masks=masks), plain(*inputs, chunks)[0], inputs)


def test_tensors_are_parameters_or_computed() -> None:
    q, k, v = (x.detach() for x in drawn())
    config = CodegenAttention.Config(
        variant="alibi", tensors={"slope": (N,)}, param_init={"slope": torch.nn.init.ones_}
    )
    module = config.build()
    module.init_states()
    assert dict(module.named_parameters())["slope"].tolist() == [1.0] * N
    want = ops.alibi(q, k, v, layout="bshd", slope=torch.ones(N))
    torch.testing.assert_close(module(q, k, v), want, rtol=0, atol=0)
    module(q, k, v).sum().backward()
    assert module.slope.grad.abs().sum() > 0
    computed = replace(config, tensors={"slope": lambda module, batch: torch.ones(batch["q"].shape[2])}).build()
    torch.testing.assert_close(computed(q, k, v), want, rtol=0, atol=0)
    assert not list(computed.parameters())


def test_wider_queries_and_keys() -> None:
    q, k, v = (x.detach() for x in drawn())
    module = CodegenAttention.Config().build()
    o = module(q, k, v.to(torch.bfloat16))
    assert o.dtype == q.dtype
    torch.testing.assert_close(o, plain(q, k, v, torch.arange(L).expand(B, L))[0], rtol=2e-2, atol=2e-2)


# --------------------------------------------------------------------------------------------------------------- models


class Plain(Module):
    """An inner attention that computes the whole matrix of scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        del config
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        del options
        return plain(q, k, v, POSITIONS)[0]


def small(attn_backend: str = "varlen") -> Any:
    config = _debugmodel(attn_backend)
    config.layers = config.layers[:2]
    return config


def replaced(config: Any, make: Callable[[], Any]) -> Any:
    for layer in config.layers:
        layer.attention.inner_attention = make()
    return config


def test_a_model() -> None:
    """Llama 3 of two layers: logits and every gradient, with the masks that the model makes itself."""
    configs = [with_codegen(small()), replaced(small(), Plain.Config)]
    models = [config.build() for config in configs]
    for model in models:
        model.init_states()
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(0, 2048, (B, L), generator=torch.Generator().manual_seed(0))
    masks = models[0].get_attention_masks(POSITIONS)
    assert isinstance(masks, VarlenMetadata)
    logits = [model(tokens, positions=POSITIONS, attention_masks=masks) for model in models]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    for each in logits:
        each.logsumexp(-1).sum().backward()
    mine, theirs = (dict(model.named_parameters()) for model in models)
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=name)


def test_with_codegen_leaves_the_config_and_reads_windows() -> None:
    config = small()
    config.layers[0].attention.inner_attention = VarlenAttention.Config(window_size=(127, 0))
    found = with_codegen(config)
    assert type(config.layers[0].attention.inner_attention) is VarlenAttention.Config
    built = [layer.attention.inner_attention.build() for layer in found.layers]
    assert [(module.variant, module.scalars) for module in built] == [("window", {"size": 128}), ("causal", {})]
    second = with_codegen(
        found, variant="alibi", tensors={"slope": (16,)}, where=lambda name: name.startswith("layers.1")
    )
    inner = [layer.attention.inner_attention for layer in second.layers]
    assert [each.variant for each in inner] == [None, "alibi"]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "variant": (lambda: CodegenAttention.Config(variant="alibbi").build(), "variant: expected one of .*got 'alibbi'"),
    "tensors": (
        lambda: CodegenAttention.Config(variant="alibi").build(),
        "scalars and tensors: expected those of alibi: slope, got none",
    ),
    "scalars": (
        lambda: CodegenAttention.Config(variant="causal", scalars={"size": 3}).build(),
        "scalars and tensors: expected those of causal: none, got size",
    ),
    "without": (
        lambda: CodegenAttention.Config(scalars={"size": 3}).build(),
        "scalars: expected none, as variant=None is found by window_size, got",
    ),
    "window": (
        lambda: CodegenAttention.Config(variant="causal", window_size=(7, 0)).build(),
        r"window_size: expected \(-1, 0\), as variant='causal' has a mask of its own, got \(7, 0\)",
    ),
    "masks": (
        lambda: CodegenAttention.Config().build()(*drawn(), attention_masks={"basic_mask": None}),
        r"attention_masks: expected VarlenMetadata, integer positions \[2, 24\] or None, got dict",
    ),
    "positions": (
        lambda: CodegenAttention.Config().build()(*drawn(), attention_masks=POSITIONS[:1]),
        r"attention_masks: expected .*got torch.int64 \[1, 24\]",
    ),
    "flex": (
        lambda: with_codegen(replaced(small(), FlexAttention.Config)),
        "config: expected layers with varlen attention: .*, got layers.0.attention.inner_attention = FlexAttention",
    ),
    "where": (
        lambda: with_codegen(small(), where=lambda name: False),
        "config: expected .*, got none that `where` picks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_the_examples_of_its_docstring() -> None:
    assert doctest.testmod(integration, raise_on_error=True).attempted > 0
