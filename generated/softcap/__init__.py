# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: host/variant_init.py.jinja
# hash: 983c7c933a0b4c23
"""`softcap`: Causal with logits capped at 20 (Bello et al., 2016, arXiv:1611.09940, section 5.1)."""
