# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/variant_init.py.jinja
# hash: 6e91385c7aa45d5d
"""`causal_dropout`: Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4)."""
