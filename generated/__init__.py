# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/package_init.py.jinja
# hash: d741774cb3054406
"""Attention ops as Triton kernels: `from <this package>.torch import full`.

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
