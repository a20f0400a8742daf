# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: full: {}
# template: ops/variant_init.py.jinja
# hash: 22d45713392e6cb5
"""`full`, with segment ids: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
