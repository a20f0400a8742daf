# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: host/variant_init.py.jinja
# hash: 25b333a42a80dedc
"""`natten`, with segment ids: Neighbourhood attention on an image of 128 x 128 positions, 13 x 13 keys (Hassani et
al., 2023, arXiv:2204.07143)."""
