# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: 26c393ae3ec0bf21
"""Attention ops as Triton kernels, those for PyTorch in the module `torch`.

Importing the package itself imports no framework.
"""

VARIANTS = (
    "full",
    "causal",
    "causal_dropout",
    "window",
    "gemma2_local",
    "alibi",
    "forgetting",
    "gpt_oss",
)
