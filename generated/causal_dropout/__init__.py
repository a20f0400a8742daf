# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: ops/variant_init.py.jinja
# hash: 9e3be07a87d90a39
"""`causal_dropout`: Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4)."""
