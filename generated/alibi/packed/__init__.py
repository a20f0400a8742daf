# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/variant_init.py.jinja
# hash: d538bf6a2b693a37
"""`alibi`, packed sequences: Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409)."""
