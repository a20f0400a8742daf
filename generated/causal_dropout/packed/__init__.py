# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/variant_init.py.jinja
# hash: 3e783b9aa87bfa9d
"""`causal_dropout`, packed sequences: Causal attention with dropout on the probabilities (Vaswani et al., 2017,
section 5.4)."""
