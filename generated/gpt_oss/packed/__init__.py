# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/variant_init.py.jinja
# hash: d43304dc46ee5c07
"""`gpt_oss`, packed sequences: The sliding-window layers of gpt-oss, a learned sink per head in the denominator
(arXiv:2508.10925)."""
