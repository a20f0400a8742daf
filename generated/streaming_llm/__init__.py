# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: streaming_llm: {mask: causal and (window(size) or prefix(sinks)), scalars: {size: {type: int, min: 1,
#     example: 256}, sinks: {type: int, min: 0, example: 4}}}
# template: host/variant_init.py.jinja
# hash: 236d7b63d669f773
"""`streaming_llm`: A causal window of `size`, and the first `sinks` keys, kept for good (Xiao et al., 2024,
arXiv:2309.17453)."""
