"""The cases of the suite `models`: a training step of a whole model, whose attention each implementation computes.

The shapes are those of published models, eight layers of each, with random weights. With a vocabulary of 32768 the
output layer does not hide attention; the published vocabulary stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.cases.packed import random_lengths

LAYERS = 8
VOCABULARY = 32768
DOCUMENTS = 12

OURS = "ours"
IMPLEMENTATIONS = (OURS, "sdpa", "cudnn", "flex", "eager")
"""`sdpa`: PyTorch's own order of backends, FlashAttention-2 first; `cudnn`: the same with cuDNN first; `flex`: compiled
FlexAttention. All are the attention implementations of transformers, under the names that it has for them."""

FLAX = (OURS, "cudnn", "xla")
"""In Flax: our op with segment ids; `jax.nn.dot_product_attention` with a mask, by cuDNN and by XLA."""

TINY = 64
"""Tokens of a row in `tiny` cases."""


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model, its rows of tokens, and the implementations that compute its attention.

    `architecture`: a class of transformers, or "Flax". `config`: fields of its config, without layers and vocabulary.
    `documents`: lengths of the documents in a row, empty if a row is one text.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    seq: int
    vocabulary: int
    batch: int = 1
    layers: int = LAYERS
    documents: tuple[int, ...] = ()
    implementations: tuple[str, ...] = IMPLEMENTATIONS

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A published model: its vocabulary, its rows as (batch, length), and the config fields that make it tiny."""

    architecture: str
    vocabulary: int
    rows: tuple[tuple[int, int], ...]
    config: Mapping[str, Any]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    documents: int = 0
    own_vocabulary_to: int = 1 << 20
    implementations: tuple[str, ...] = IMPLEMENTATIONS


def _shape(
    width: int, inner: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    found = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


_SMALL = _shape(64, 96, 4, 2, 16)

MODELS = {
    # Logits of 32768 tokens by 256000 words, in float32 with their gradient, leave no room for a model.
    "gemma-2-2b": _Model(
        architecture="Gemma2ForCausalLM",
        vocabulary=256000,
        rows=((1, 8192), (1, 32768)),
        config=_shape(2304, 9216, 8, 4, 256, sliding_window=4096, query_pre_attn_scalar=256),
        tiny={**_SMALL, "sliding_window": 32},
        own_vocabulary_to=16384,
    ),
    # Four experts of 2880 are active for a token: the MLP has their width. See `bench.peers.model_peers.dense`.
    "gpt-oss-20b, dense MLP": _Model(
        architecture="GptOssForCausalLM",
        vocabulary=201088,
        rows=((1, 8192), (1, 16384)),
        config=_shape(2880, 4 * 2880, 64, 8, 64, sliding_window=128),
        tiny={**_SMALL, "sliding_window": 32},
        implementations=(OURS, "sdpa", "flex", "eager"),
    ),
    "llama-3-8b": _Model(
        architecture="LlamaForCausalLM",
        vocabulary=128256,
        rows=((1, 8192),),
        config=_shape(4096, 14336, 32, 8, 128),
        tiny=_SMALL,
    ),
    "qwen3-4b": _Model(
        architecture="Qwen3ForCausalLM",
        vocabulary=151936,
        rows=((1, 16384),),
        config=_shape(2560, 9728, 32, 8, 128, tie_word_embeddings=True),
        tiny=_SMALL,
        documents=DOCUMENTS,
    ),
    "modernbert-base": _Model(
        architecture="ModernBertForMaskedLM",
        vocabulary=50368,
        rows=((2, 8192), (8, 8192)),
        config={"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12, "local_attention": 128},
        tiny={"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "local_attention": 32},
    ),
    "flax nnx GPT": _Model(
        architecture="Flax",
        vocabulary=VOCABULARY,
        rows=((1, 16384),),
        config=_shape(2048, 8192, 16, 8),
        tiny=_shape(64, 96, 4, 2),
        documents=DOCUMENTS,
        implementations=FLAX,
    ),
}


def cases(*, tiny: bool = False) -> list[ModelCase]:
    """Every case, with a small vocabulary and the model's own. `tiny`: one case of each model, in a size for a CPU."""
    found = []
    for name, model in MODELS.items():
        rows = ((2, TINY),) if tiny else model.rows
        for batch, seq in rows:
            for vocabulary in dict.fromkeys((VOCABULARY, model.vocabulary)):
                if vocabulary != VOCABULARY and (tiny or seq > model.own_vocabulary_to):
                    continue
                kind = f", {model.documents} documents a row" if model.documents else ""
                words = "" if tiny else f" V{round(vocabulary / 1000)}k"
                found.append(
                    ModelCase(
                        name=f"{'tiny ' if tiny else ''}{name}{kind} B{batch} S{seq}{words}",
                        architecture=model.architecture,
                        config={**model.config, **(model.tiny if tiny else {})},
                        batch=batch,
                        seq=seq,
                        layers=2 if tiny else LAYERS,
                        vocabulary=128 if tiny else vocabulary,
                        documents=random_lengths(seq, model.documents) if model.documents else (),
                        implementations=model.implementations,
                    )
                )
    return found


def chosen(
    every: Sequence[ModelCase], pattern: re.Pattern[str] | None, implementations: Sequence[str] | None
) -> list[ModelCase]:
    """The cases whose names match, with ours and those of their implementations that are wanted (None: all)."""
    kept = [case for case in every if pattern is None or pattern.search(case.name)]
    if implementations is None:
        return kept
    wanted = {OURS, *implementations}
    return [replace(case, implementations=tuple(x for x in case.implementations if x in wanted)) for case in kept]
