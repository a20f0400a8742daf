# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/variant_init.py.jinja
# hash: f4634f9aa5380d13
"""`gemma2_local`, packed sequences: The local layers of Gemma 2, a window of 4096 and logits capped at 50
(arXiv:2408.00118, table 1)."""
