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
LONG = 16384
DIMS_SEQ = 8192
DIMS = (64, 80, 96, 112, 128, 192, 256)

OF_PAIRS = ("band_bias", "band_mask")
OF_LIBRARIES = ("band", "band_softcap", "band_sink", "band_images", "chunked")
"""Variants for the models of other libraries, which `core` has no target for."""

CORE_PEERS = ("flex-max", "cudnn", "fa4")

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
    """32 query heads on 8 key heads, 16k tokens, with peers that compile in little time."""
    return [
        Case(
            variant=variant,
            shape=Shape(batch=TOKENS // seq, heads=32, kv_heads=8, seq=seq, dim=dim),
            peers=("cudnn", "fa4"),
        )
        for seq in sizes.seqs or GQA_SEQS
        for dim in sizes.dims
        for variant in ("causal", "full")
    ]


def dims(_: Sizes) -> list[Case]:
    """Head dims that are powers of two and head dims that are not."""
    return [
        Case(
            variant="causal",
            shape=Shape(batch=2, heads=16, kv_heads=16, seq=DIMS_SEQ, dim=dim),
            peers=("flex", "cudnn"),
        )
        for dim in DIMS
    ]


def variants(sizes: Sizes) -> list[Case]:
    """Every variant of the package, with gradients of its own tensors; no peers by default.

    A tensor with an element for each pair, 2 GB a head at these lengths with its gradient, leaves its variant out.
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


SUITES: dict[str, Callable[[Sizes], Sequence[Case]]] = {
    "core": core,
    "fa3": fa3,
    "paper": paper,
    "fla": fla,
    "gqa": gqa,
    "dims": dims,
    "variants": variants,
}
