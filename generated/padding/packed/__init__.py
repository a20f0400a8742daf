# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: host/variant_init.py.jinja
# hash: 2415663b658c007e
"""`padding`, packed sequences: Keys from `length[b]` on are padding, which no query attends to (Vaswani et al.,
2017, arXiv:1706.03762)."""
