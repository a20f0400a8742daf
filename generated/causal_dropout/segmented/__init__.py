# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: ops/variant_init.py.jinja
# hash: 5c99d448123d634f
"""`causal_dropout`, with segment ids: Causal attention with dropout on the probabilities (Vaswani et al., 2017,
section 5.4)."""
