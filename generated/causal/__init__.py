# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: causal: {mask: causal}
# template: ops/variant_init.py.jinja
# hash: de047e0e4ae202e6
"""`causal`: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3)."""
