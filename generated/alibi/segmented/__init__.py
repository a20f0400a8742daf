# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: ops/variant_init.py.jinja
# hash: df551a0037c80da1
"""`alibi`, with segment ids: Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409)."""
