# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/variant_init.py.jinja
# hash: 5e1915f2dbdc8207
"""`full`, with segment ids: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
