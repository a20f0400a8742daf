# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal: {mask: causal}
# template: host/variant_init.py.jinja
# hash: d6b0203dd03354c4
"""`causal`: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3)."""
