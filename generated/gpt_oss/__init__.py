# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/variant_init.py.jinja
# hash: 74651c91131a4f53
"""`gpt_oss`: The sliding-window layers of gpt-oss, a learned sink per head in the denominator (arXiv:2508.10925)."""
