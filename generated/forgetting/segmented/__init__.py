# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: host/variant_init.py.jinja
# hash: 8e0d73d6a4785d3c
"""`forgetting`, with segment ids: Forgetting attention, a log-decay per position and head (Lin et al., 2025,
arXiv:2503.02130)."""
