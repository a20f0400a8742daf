# Generated from variants.yaml; do not edit. To change it: edit the entry or the template, then `python -m codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: ops/variant_init.py.jinja
# hash: 30128dc071ee4531
"""`alibi`: Attention with linear biases; the slopes may be trained (Press et al., 2022, arXiv:2108.12409)."""
