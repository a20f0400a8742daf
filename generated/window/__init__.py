# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: int}}
# template: ops/variant_init.py.jinja
# hash: e12cfad2d3128e8d
"""`window`: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825)."""
