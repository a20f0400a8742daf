# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: cbb250353f981a29
"""Attention ops as Triton kernels, those for PyTorch in the module `torch`.

Importing the package itself imports no framework.
"""

VARIANTS = (
    "full",
    "causal",
    "window",
    "gemma2_local",
    "alibi",
    "forgetting",
    "gpt_oss",
)
