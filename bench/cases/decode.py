"""The cases of the decode suite: queries on long caches in pages, in the shapes that servers meet."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

HEADS, KV_HEADS, DIM = 32, 8, 128
MIXED = (1024, 16384)
OURS = ("codegen", "contiguous", "balanced", "bfloat16", "single", "packed", "apart", "jax")
"""Our implementations. All others are peers. `codegen`: on pages. `contiguous`: one page for each sequence. `balanced`:
splits that balance a batch. `bfloat16`: caches of bfloat16 if the case has 8 bits. `single`: one query if the case has
more. `packed`: the packed op, without pages. `apart`: a call for each number of queries. `jax`: on pages in JAX."""

PEERS = ("flashinfer", "fa3", "sdpa", "pallas")
BASES = {"codegen": ("bfloat16", "single", "packed", "apart", "contiguous"), "jax": ("pallas",)}
"""For each of ours, the implementations that it is compared with as a ratio: the first of them that the case has."""

FP8 = "float8_e4m3fn"
PROMPT_VARIANTS = ("window", "alibi", "softcap", "gemma2_local", "gpt_oss")
CHECK_KEYS, CHECK_QUERIES = 2000, 640
"""Most keys and queries of a sequence in the comparison with float64: enough for Hopper's kernels to run."""

FEW_QUERIES = 16
"""With at most this many queries a call is bound by memory, and its rate is in bytes; with more, by computation."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One step: `lengths` has the keys of each sequence, `queries` is the number of its last tokens that are queries.

    A tuple of `queries` has one number for each sequence, and the queries are packed into one call. `cache` is the
    dtype of keys and values; 8-bit caches have a scale for each key head. `value_dim`: the first columns of a key that
    are its value, as in latent attention; None if values are stored apart.
    """

    name: str
    lengths: tuple[int, ...]
    implementations: tuple[str, ...] = ("codegen",)
    variant: str = "causal"
    page_size: int = 64
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    queries: int | tuple[int, ...] = 1
    dim: int = DIM
    value_dim: int | None = None
    cache: str = "bfloat16"

    @property
    def counts(self) -> tuple[int, ...]:
        """The queries of each sequence."""
        return self.queries if isinstance(self.queries, tuple) else (self.queries,) * len(self.lengths)

    def small(self) -> DecodeCase:
        """The case with two of its sequences, cut to CHECK_KEYS, for comparison with float64."""
        packed = isinstance(self.queries, tuple)
        # In a packed case the first sequences are prompts, and the last ones decode.
        chosen = (0, len(self.lengths) - 1) if packed else range(min(2, len(self.lengths)))
        cut = tuple(min(self.lengths[at], CHECK_KEYS - 700 * number) for number, at in enumerate(chosen))
        counts = tuple(min(self.counts[at], CHECK_QUERIES) for at in chosen)
        return replace(self, lengths=cut, queries=counts if packed else counts[0])

    def read_by(self, implementation: str) -> DecodeCase:
        """The case as an implementation takes it: `bfloat16` has caches of that dtype, `single` has one query."""
        changes: dict[str, dict[str, Any]] = {"bfloat16": {"cache": "bfloat16"}, "single": {"queries": 1}}
        return replace(self, **changes.get(implementation, {}))


def mixed_lengths(sequences: int = 64) -> tuple[int, ...]:
    """Lengths drawn evenly between the ends of MIXED, the same in each run."""
    rng = random.Random(1)
    return tuple(rng.randint(*MIXED) for _ in range(sequences))


def cases(variants: Iterable[str]) -> list[DecodeCase]:
    """Every case; `variants` are those that have kernels on pages."""
    mixed, both, peers = mixed_lengths(), ("codegen", "contiguous"), ("flashinfer", "fa3", "sdpa")
    found = [
        _causal("B1 S131072", (131072,), (*both, *peers)),
        _causal("B1 S32768", (32768,), ("codegen", *peers)),
        *(_causal(f"B1 S{seq}", (seq,), ("codegen", *peers)) for seq in (8192, 4096, 1024)),
        _causal("B16 S8192", (8192,) * 16, (*both, *peers)),
        _causal("B64 S8192", (8192,) * 64, (*both, *peers)),
        _causal("B256 S1024", (1024,) * 256, ("codegen", *peers)),
        *(
            replace(
                _causal(
                    f"B64 mixed page {page}",
                    mixed,
                    (*both, *(("balanced", "flashinfer", "fa3") if page == 16 else ())),
                ),
                page_size=page,
            )
            for page in (16, 1, 64, 256)
        ),
        *(
            replace(_causal(f"B16 S8192 H{8 * group}/8", (8192,) * 16, ("codegen", "flashinfer")), heads=8 * group)
            for group in (1, 3, 5, 7, 8, 16)
        ),
        *(
            replace(_causal(f"B16 S8192 {queries} queries", (8192,) * 16, ("codegen", "single")), queries=queries)
            for queries in (4, 8)
        ),
    ]
    every = [
        DecodeCase(name=f"B64 S8192 {variant}", lengths=(8192,) * 64, variant=variant)
        for variant in variants
        if variant != "causal"
    ]
    return [*found, *_eight_bits(), *_latent(), *_wide(), *_prompts(variants), *_together(), *every]


def _eight_bits() -> list[DecodeCase]:
    """Caches of 8 bits, beside the same caches in 16 bits."""
    steps = {"B64 mixed page 16": (mixed_lengths(), 16), "B16 S8192": ((8192,) * 16, 64), "B1 S131072": ((131072,), 64)}
    return [
        replace(_causal(f"{name} fp8", lengths, ("codegen", "bfloat16")), page_size=size, cache=FP8)
        for name, (lengths, size) in steps.items()
    ]


def _latent() -> list[DecodeCase]:
    """Multi-head latent attention: all heads of the model, or those of one of two, four or eight GPUs, on one key of
    576 columns. In the last case each sequence has a prompt behind a cached prefix."""
    implementations = ("codegen", "balanced")
    latent = DecodeCase(name="", lengths=(), kv_heads=1, dim=576, value_dim=512, implementations=implementations)
    found = [
        replace(latent, name=f"B64 S{length} latent {heads} heads", lengths=(length,) * 64, heads=heads)
        for length, heads in ((8192, 16), (8192, 128), (4096, 32), (4096, 64), (4096, 128))
    ]
    found += [
        replace(latent, name="B1 S131072 latent 128 heads", lengths=(131072,), heads=128),
        replace(latent, name="B2 S8192 latent 128 heads 512 queries", lengths=(8192,) * 2, heads=128, queries=512),
    ]
    return [*found, *(replace(case, name=f"{case.name} fp8", cache=FP8) for case in found)]


def _wide() -> list[DecodeCase]:
    """Heads of 256 and 512 columns, as Gemma's: a token for each of 16 sequences, and the end of a prompt."""
    found = []
    for dim in (256, 512):
        head = DecodeCase(name="", lengths=(), heads=32, kv_heads=4, dim=dim)
        found += [
            replace(
                head, name=f"B16 S8192 H32/4 D{dim}", lengths=(8192,) * 16, implementations=("codegen", "contiguous")
            ),
            replace(
                head,
                name=f"prompt 2048 of 32768 H32/4 D{dim}",
                lengths=(32768,),
                implementations=("codegen", "packed"),
                queries=2048,
            ),
        ]
    return found


def _prompts(variants: Iterable[str]) -> list[DecodeCase]:
    """The last 2048 queries of a prompt of 32768 tokens, whose other keys are cached, beside the packed op."""
    sizes = [("causal", size) for size in (16, 64, 256)] + [
        (variant, 64) for variant in variants if variant in PROMPT_VARIANTS
    ]
    return [
        DecodeCase(
            name=f"prompt 2048 of 32768 {variant} page {size}",
            lengths=(32768,),
            implementations=("codegen", "packed"),
            variant=variant,
            page_size=size,
            queries=2048,
        )
        for variant, size in sizes
    ]


def _together() -> list[DecodeCase]:
    """Prompts beside decoding sequences, in one call and in two; and a step in JAX."""
    prompts, decoding = 8, 56
    step = DecodeCase(
        name=f"mixed step {prompts} x 512 of 4096 + {decoding} x 1",
        lengths=(*(4096,) * prompts, *mixed_lengths(decoding)),
        implementations=("codegen", "apart"),
        queries=(*(512,) * prompts, *(1,) * decoding),
    )
    in_jax = replace(_causal("B16 S8192 page 16 in JAX", (8192,) * 16, ("jax", "pallas")), page_size=16)
    return [step, in_jax]


def _causal(name: str, lengths: tuple[int, ...], implementations: tuple[str, ...]) -> DecodeCase:
    return DecodeCase(name=name, lengths=lengths, implementations=implementations)


def with_peers(case: DecodeCase, wanted: Sequence[str] | None, absent: Iterable[str]) -> DecodeCase:
    """The case with ours and those of its peers that are `wanted` (None: all), without the `absent` ones."""
    kept = {*OURS, *(case.implementations if wanted is None else wanted)} - set(absent)
    return replace(case, implementations=tuple(name for name in case.implementations if name in kept))
