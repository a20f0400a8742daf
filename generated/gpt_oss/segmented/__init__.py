# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: ops/variant_init.py.jinja
# hash: affe7d2e8144d5b5
"""`gpt_oss`, with segment ids: The sliding-window layers of gpt-oss, a learned sink per head in the denominator
(arXiv:2508.10925)."""
