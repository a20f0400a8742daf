# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/variant_init.py.jinja
# hash: 3e4dad54923bcdce
"""`alibi`, with segment ids: Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409)."""
