# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: e98d601decc4da4b
"""Attention ops as Triton kernels, those for PyTorch in the module `torch`.

Importing the package itself imports no framework.
"""

VARIANTS = (
    "full",
    "causal",
    "window",
    "prefix_lm",
    "document",
    "natten",
    "softcap",
    "gemma2_local",
    "alibi",
    "forgetting",
    "gpt_oss",
)
