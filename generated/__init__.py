# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/package_init.py.jinja
# hash: 26cea23dc41328b7
"""Attention ops as Triton kernels. The module `torch` has the ops for PyTorch.

Importing the package itself imports no framework.
"""

VARIANTS = (
    "full",
    "causal",
    "causal_dropout",
    "window",
    "prefix_lm",
    "document",
    "padding",
    "streaming_llm",
    "natten",
    "softcap",
    "gemma2_local",
    "alibi",
    "relative_bias",
    "forgetting",
    "forgetting_pruned",
    "gpt_oss",
    "chunked",
    "band",
    "band_softcap",
    "band_sink",
    "band_bias",
    "band_mask",
    "band_images",
)
