"""The cases of each speed suite.

Shapes and variants are those of the benchmarks that the peers publish. `core` has the cases of the project's targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cases.case import Case, able, with_peers
from codegen.testing.golden import Shape, load_manifest

TOKENS, HIDDEN = 16384, 2048
"""FlashAttention-3's benchmark (arXiv:2407.08608, section 4.1): total tokens, and heads x head_dim."""

FA3_SEQS = (512, 1024, 2048, 4096, 8192, 16384)
CORE_SEQS = (16384, 2048, 4096)
GQA_SEQS = (16384, 8192, 2048)
FEW_KEY_HEADS = (
    (8, 1, 8192, 128),
    (8, 1, 2048, 128),
    (16, 2, 8192, 128),
    (32, 8, 2048, 128),
    (8, 1, 8192, 64),
    (8, 1, 8192, 256),
)
"""Query heads, key heads, tokens and head dim of single sequences with few blocks of keys for a GPU."""

LONG = 16384
DIMS_SEQ = 8192
DIMS = (64, 80, 96, 112, 128, 160, 192, 256)

WIDE = (
    (2, 16, 16, 8192, 512),
    (1, 16, 1, 8192, 512),
    (1, 16, 2, 16384, 512),
    (1, 32, 4, 4096, 512),
    (8, 16, 2, 512, 512),
    (2, 16, 16, 8192, 320),
)
"""Batch rows, query heads, key heads, tokens and head dim of heads with more than 256 columns. Those with few key heads
are like Gemma 4's global layers."""

OF_PAIRS = ("band_bias", "band_mask")
OF_LIBRARIES = ("band", "band_softcap", "band_sink", "band_images", "chunked")
"""Variants for the models of other libraries, which `core` has no target for."""

CORE_PEERS = ("flex-max", "cudnn", "fa4")

FRONT_PEERS = ("fa4", "cudnn", "flex")
FRONT_SHORT = (512, 128)
FRONT_VARIANTS = (
    "window",
    "softcap",
    "document",
    "gpt_oss",
    "gemma2_local",
    "alibi",
    "relative_bias",
    "natten",
    "streaming_llm",
    "prefix_lm",
    "padding",
    "forgetting",
    "causal_dropout",
)
"""The variants of the suite `front`, in its order."""

SCALARS: dict[str, dict[str, int | float]] = {
    "window": {"size": 1024},
    "prefix_lm": {"length": 1024},
    "streaming_llm": {"size": 1024, "sinks": 4},
}
"""The scalars of benchmark calls; other variants take the examples of the spec."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sequence lengths (None: each suite's own) and head_dims that the suites cover."""

    seqs: tuple[int, ...] | None = None
    dims: tuple[int, ...] = (64, 128, 256)


def fa3_shape(seq: int, dim: int) -> Shape:
    """FlashAttention-3's shape for a sequence length and head_dim: 16k tokens, hidden size 2048."""
    heads = HIDDEN // dim
    return Shape(batch=max(1, TOKENS // seq), heads=heads, kv_heads=heads, seq=seq, dim=dim)


def _beside_all(case: Case) -> Case:
    return with_peers(case, able(case))


def fa3(sizes: Sizes) -> list[Case]:
    """FlashAttention-3's benchmark, with every peer."""
    return [
        _beside_all(Case(variant=variant, shape=fa3_shape(seq, dim)))
        for variant in ("causal", "full")
        for dim in sizes.dims
        for seq in sizes.seqs or FA3_SEQS
    ]


def paper(_: Sizes, seq: int = LONG, dim: int = 64) -> list[Case]:
    """The variants of the FlexAttention paper (arXiv:2412.05496): batch 4, 16 query heads on 16 and on 2 key heads.

    Added is a learned relative bias, whose gradient FlexAttention accumulates with atomics.
    """
    names = ("full", "causal", "alibi", "window", "prefix_lm", "softcap", "document", "natten")
    cases = []
    for kv_heads in (16, 2):
        shape = Shape(batch=4, heads=16, kv_heads=kv_heads, seq=seq, dim=dim)
        cases += [
            Case(variant=name, shape=shape, scalars=dict(SCALARS.get(name, {})), own_grads=False) for name in names
        ]
        cases.append(Case(variant="relative_bias", shape=shape))
    return cases


def fla(_: Sizes) -> list[Case]:
    """FLA's `parallel_attn` with a log-decay, and without one as plain causal attention."""
    shapes = (
        Shape(batch=1, heads=32, kv_heads=8, seq=LONG, dim=128),
        Shape(batch=2, heads=16, kv_heads=16, seq=LONG, dim=64),
        Shape(batch=8, heads=32, kv_heads=8, seq=2048, dim=128),
    )
    return [
        Case(variant=variant, shape=shape, peers=("fla",)) for variant in ("forgetting", "causal") for shape in shapes
    ]


def gqa(sizes: Sizes) -> list[Case]:
    """32 query heads on 8 key heads, 16k tokens, with peers that compile in little time; then single sequences with few
    key heads, as on one GPU of several that share the heads of a model."""
    shapes = [
        Shape(batch=TOKENS // seq, heads=32, kv_heads=8, seq=seq, dim=dim)
        for seq in sizes.seqs or GQA_SEQS
        for dim in sizes.dims
    ]
    few = [Shape(batch=1, heads=h, kv_heads=kv, seq=seq, dim=dim) for h, kv, seq, dim in FEW_KEY_HEADS]
    wanted = [(variant, shape) for shape in shapes for variant in ("causal", "full")]
    wanted += [("causal", shape) for shape in few if not sizes.seqs and shape.dim in sizes.dims]
    return [Case(variant=variant, shape=shape, peers=("cudnn", "fa4")) for variant, shape in wanted]


def dims(_: Sizes) -> list[Case]:
    """Head dims that are powers of two and head dims that are not; last those of DeepSeek's layers in training."""
    shapes = [Shape(batch=2, heads=16, kv_heads=16, seq=DIMS_SEQ, dim=dim) for dim in DIMS]
    latent = Shape(batch=2, heads=16, kv_heads=16, seq=DIMS_SEQ, dim=192, dim_v=128)
    peers = ("flex", "cudnn", "fa4")
    return [
        *(Case(variant="causal", shape=shape, peers=peers) for shape in shapes),
        Case(variant="causal", shape=latent, peers=peers),
    ]


def wide(_: Sizes) -> list[Case]:
    """Heads of more than 256 columns, which cuDNN and FlashAttention refuse."""
    shapes = [Shape(batch=b, heads=h, kv_heads=kv, seq=seq, dim=dim) for b, h, kv, seq, dim in WIDE]
    cases = [Case(variant="causal", shape=shape, peers=()) for shape in shapes]
    return [with_peers(case, ("flex", "efficient")) for case in cases]


def variants(sizes: Sizes) -> list[Case]:
    """Every variant of the package, with gradients of its own tensors; no peers by default.

    Variants whose tensor has an element for each pair are left out: with its gradient, it takes 2 GB a head.
    """
    return [
        Case(variant=name, shape=fa3_shape(LONG, dim), scalars=_scalars(name), peers=())
        for dim in sizes.dims
        if dim <= 128
        for name in sorted(load_manifest(), key=lambda each: (each != "causal", each))
        if name not in OF_PAIRS
    ]


def _scalars(variant: str) -> dict[str, int | float]:
    """All scalars of a variant, so that its unmasked scores can be counted."""
    entry = load_manifest()[variant]
    if variant in SCALARS:
        return dict(SCALARS[variant])
    examples = entry["scalar_examples"]
    return {name: 256 if examples[name] is None else examples[name] for name in entry["scalars"]}


def core(sizes: Sizes) -> list[Case]:
    """The cases of the targets: forgetting, FlexAttention with max-autotune, head dims, variants.

    The longest sequences come first and the other lengths last, so that a run that is cut short drops a length.
    """
    first, *others = sizes.seqs or CORE_SEQS
    decayed = [case for case in fla(sizes) if case.variant == "forgetting"]
    chosen = [case for case in variants(sizes) if case.variant not in OF_LIBRARIES]
    own = [with_peers(case, ()) for case in (*dims(sizes), *chosen)]
    return [*decayed, *_tuned(sizes, (first,)), *own, *_tuned(sizes, others)]


def _tuned(sizes: Sizes, seqs: Sequence[int]) -> list[Case]:
    return [
        Case(variant=variant, shape=fa3_shape(seq, dim), peers=CORE_PEERS)
        for seq in seqs
        for dim in sizes.dims
        for variant in ("causal", "full")
    ]


def front(_: Sizes) -> list[Case]:
    """The shapes that matter most, beside every peer that can compute them; the most important first.

    Causal attention at 16k tokens, then short sequences, then variants at 16k. Each variant has causal of its shape.
    """
    cases = [_causal(LONG, dim) for dim in (128, 64, 256)] + [_causal(LONG, 128, kv_heads=8)]
    for seq in FRONT_SHORT:
        cases += [_causal(seq, 64), _causal(seq, 128, kv_heads=8), _causal(seq, 256)]
    for name in FRONT_VARIANTS:
        for dim in (64,) if name in ("window", "gpt_oss") else (128, 64):
            frozen = name == "alibi"
            cases.append(
                Case(variant=name, shape=fa3_shape(LONG, dim), scalars=_scalars(name), own_grads=not frozen, peers=())
            )
    return [with_peers(case, ("fla",) if case.variant == "forgetting" else FRONT_PEERS) for case in cases]


def _causal(seq: int, dim: int, *, kv_heads: int | None = None) -> Case:
    """Causal attention of 16k tokens: of hidden size 2048, or of 32 query heads on `kv_heads`."""
    if kv_heads is None:
        return Case(variant="causal", shape=fa3_shape(seq, dim))
    shape = Shape(batch=max(1, TOKENS // seq), heads=32, kv_heads=kv_heads, seq=seq, dim=dim)
    return Case(variant="causal", shape=shape)


SUITES: dict[str, Callable[[Sizes], Sequence[Case]]] = {
    "front": front,
    "core": core,
    "fa3": fa3,
    "paper": paper,
    "fla": fla,
    "gqa": gqa,
    "dims": dims,
    "wide": wide,
    "variants": variants,
}
