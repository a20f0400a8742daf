# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: 50041d326cd4ed69
"""`window`: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825)."""
