# SPDX-License-Identifier: Apache-2.0
"""Copies between shared memory and memory by Hopper's hardware (TMA), under one name for all versions of Triton."""

from typing import Any

from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# The names that Triton 3.9 gives them; before, one had another and the other was missing.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

if hasattr(tma, "async_atomic_add"):
    async_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin  # type: ignore[untyped-decorator]  # Triton has no types
    def async_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Add a tile in shared memory to memory."""
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, place, src.handle)
