# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: cad6f4b15cbeea02
"""Attention ops as Triton kernels. `from <this package>.torch import full`; importing the package imports no framework."""

VARIANTS = (
    "full",
    "causal",
    "window",
    "gemma2_local",
    "alibi",
    "forgetting",
    "gpt_oss",
)
