"""What the gallery says of variants that no spec file does: sources that are no arXiv numbers, and sizes to draw."""

from __future__ import annotations

import re

from codegen.inspect.portrait import View
from codegen.spec.model import Variant

ATTENTION_GYM = ("attention-gym", "https://github.com/meta-pytorch/attention-gym")
FLEX_TESTS = (
    "tests of FlexAttention, PyTorch",
    "https://github.com/pytorch/pytorch/blob/main/test/inductor/test_flex_attention.py",
)
VASWANI = ("arXiv:1706.03762", "https://arxiv.org/abs/1706.03762")

SOURCES: dict[str, list[tuple[str, str]]] = {
    "causal": [VASWANI],
    "causal_dropout": [VASWANI],
    "document": [("arXiv:2412.05496, FlexAttention, document masking", "https://arxiv.org/abs/2412.05496")],
    "alternating_directions": [ATTENTION_GYM],
    "natten_morton": [ATTENTION_GYM],
    "chunked": [
        (
            "Hugging Face transformers, llama4",
            "https://github.com/huggingface/transformers/tree/main/src/transformers/models/llama4",
        )
    ],
    "band_mask": [
        (
            "jax.nn.dot_product_attention",
            "https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html",
        )
    ],
    "tensor_mask": [
        (
            "torch.nn.functional.scaled_dot_product_attention",
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        )
    ],
    "pair_bias": [("OpenFold", "https://github.com/aqlaboratory/openfold")],
    "t5_bias": [("mesh-tensorflow", "https://github.com/tensorflow/mesh")],
    "t5_bias_causal": [("mesh-tensorflow", "https://github.com/tensorflow/mesh")],
}
"""Variant -> title and address of what its `doc` names without a number."""

FLEX_TESTED = "FlexAttention's tests"
"""How the `doc` of a variant names the tests of FlexAttention."""

ON_CANVAS = ("natten", "sasa", "swin", "flamingo", "transfusion", "block_causal", "bidirectional_span")
"""Beginnings of the names of variants for images and video, which no formula shows."""

VIEWS = {
    # 32 rows of its canvas.
    "natten": View(q_len=4096, kv_len=4096, block_m=128, block_n=128),
    # Twice its window.
    "gemma2_local": View(q_len=8192, kv_len=8192, block_m=256, block_n=256),
}
"""Variant -> what is drawn, where 1024 tokens show too little."""

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def sources(variant: Variant) -> list[tuple[str, str]]:
    """Title and address of each source of a variant: the arXiv numbers of its `doc`, and `SOURCES`."""
    found = [(f"arXiv:{number}", f"https://arxiv.org/abs/{number}") for number in _ARXIV.findall(variant.doc)]
    if FLEX_TESTED in variant.doc:
        found.append(FLEX_TESTS)
    return [*found, *(entry for entry in SOURCES.get(variant.name, []) if entry not in found)]


def view_of(variant: Variant) -> View:
    """The call that is drawn of a variant."""
    return VIEWS.get(variant.name, View())
