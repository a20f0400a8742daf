# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/variant_init.py.jinja
# hash: 67b1759e1a323afa
"""`full`: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
