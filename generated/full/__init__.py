# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: full: {}
# template: ops/variant_init.py.jinja
# hash: 7c21d8b2f30d24ee
"""`full`: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
