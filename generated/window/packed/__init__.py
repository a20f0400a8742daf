# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: f6ae8e47b500f653
"""`window`, packed sequences: Causal with a window of `size` keys, the query's own included (Mistral 7B,
arXiv:2310.06825)."""
