# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: ops/variant_init.py.jinja
# hash: 7f949534674625e6
"""`gpt_oss`: The sliding-window layers of gpt-oss, a learned sink per head in the denominator (arXiv:2508.10925)."""
