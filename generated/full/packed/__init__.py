# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: full: {}
# template: ops/variant_init.py.jinja
# hash: 3f4e500dbffac4f8
"""`full`, packed sequences: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
