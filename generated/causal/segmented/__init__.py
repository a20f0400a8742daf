# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal: {mask: causal}
# template: ops/variant_init.py.jinja
# hash: 5d06f0d3e2ceb528
"""`causal`, with segment ids: A query attends to itself and to what came before (Vaswani et al., 2017, section
3.2.3)."""
