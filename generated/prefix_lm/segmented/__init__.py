# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/variant_init.py.jinja
# hash: 9e0ef4d0d0d21894
"""`prefix_lm`, with segment ids: Causal, but for a prefix of `length` keys that every query attends to (Raffel et
al., 2020, arXiv:1910.10683)."""
