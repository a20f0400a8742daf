# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: int}}
# template: ops/variant_init.py.jinja
# hash: 6261cb1d590cea82
"""`window`: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825)."""
