# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: ca3fcbf1a622de99
"""Attention ops as Triton kernels, those for PyTorch in the module `torch`.

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
    "gpt_oss",
)
