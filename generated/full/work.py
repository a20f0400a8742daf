# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/work.py.jinja
# hash: 46fbba244e7f176c
"""Which keys a block of queries visits under `full`: for plans of calls over several GPUs."""

from .._runtime.core.work import VariantWork

WORK = VariantWork(
    op="full",
    tensors={},
)
