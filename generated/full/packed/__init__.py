# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/variant_init.py.jinja
# hash: 27eb2b76c8fea450
"""`full`, packed sequences: Every query attends to every key (Vaswani et al., 2017, arXiv:1706.03762)."""
