# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/variant_init.py.jinja
# hash: 38fca1dd45146fde
"""`relative_bias`, packed sequences: A learned bias per head and distance; those beyond the table have its last
(Raffel et al., 2020, arXiv:1910.10683)."""
