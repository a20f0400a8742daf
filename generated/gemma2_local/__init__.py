# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/variant_init.py.jinja
# hash: 5d42510c2d143b90
"""`gemma2_local`: The local layers of Gemma 2, a window of 4096 and logits capped at 50 (arXiv:2408.00118, table 1)."""
