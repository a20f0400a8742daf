# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: host/variant_init.py.jinja
# hash: eb60c17d56e992a3
"""`forgetting`, packed sequences: Forgetting attention, a log-decay per position and head (Lin et al., 2025,
arXiv:2503.02130)."""
