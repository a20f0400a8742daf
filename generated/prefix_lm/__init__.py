# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/variant_init.py.jinja
# hash: b6d481c3cbeea483
"""`prefix_lm`: Causal, but for a prefix of `length` keys that every query attends to (Raffel et al., 2020,
arXiv:1910.10683)."""
