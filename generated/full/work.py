# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/work.py.jinja
# hash: 398a61b7e46cc75d
"""Which keys a block of queries visits under `full`: for plans of calls over several GPUs."""

from .._runtime.core.parallel.work import VariantWork

WORK = VariantWork(
    op="full",
    tensors={},
    shift_invariant=True,
)
