# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: host/variant_init.py.jinja
# hash: aa92005facbec6e7
"""`forgetting`: Forgetting attention, a log-decay per position and head (Lin et al., 2025, arXiv:2503.02130)."""
