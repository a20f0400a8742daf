# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: ops/variant_init.py.jinja
# hash: 939d878a133b5b85
"""`forgetting`: Forgetting attention, a log-decay per position and head (Lin et al., 2025, arXiv:2503.02130)."""
