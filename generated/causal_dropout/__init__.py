# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/variant_init.py.jinja
# hash: c98f6506b8de8d6f
"""`causal_dropout`: Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4)."""
