# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/variant_init.py.jinja
# hash: 93505e644c4e4ada
"""`document`, with segment ids: Causal within each document of a packed row; `doc` numbers them, in any order."""
