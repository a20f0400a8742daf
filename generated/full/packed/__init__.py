# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: full: {}
# template: host/variant_init.py.jinja
# hash: 35a0e031195c2c5c
"""`full`, packed sequences: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
