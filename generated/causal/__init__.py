# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal: {mask: causal}
# template: host/variant_init.py.jinja
# hash: af62886acf7c500d
"""`causal`: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3)."""
