# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/variant_init.py.jinja
# hash: a158a37fab0e764d
"""`causal_dropout`, with segment ids: Causal attention with dropout on the probabilities (Vaswani et al., 2017,
section 5.4)."""
