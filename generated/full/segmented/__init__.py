# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: full: {}
# template: host/variant_init.py.jinja
# hash: 16a907139e1c625b
"""`full`, with segment ids: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
