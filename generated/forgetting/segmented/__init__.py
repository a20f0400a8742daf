# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: ops/variant_init.py.jinja
# hash: 4b4951844c667d14
"""`forgetting`, with segment ids: Forgetting attention, a log-decay per position and head (Lin et al., 2025,
arXiv:2503.02130)."""
