# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: ops/variant_init.py.jinja
# hash: 8a247736327bcaea
"""`softcap`, packed sequences: Causal with logits capped at 20 (Bello et al., 2016, arXiv:1611.09940, section 5.1)."""
