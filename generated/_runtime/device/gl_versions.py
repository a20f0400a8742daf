# SPDX-License-Identifier: Apache-2.0
"""What differs in Gluon between Triton 3.6 and 3.9."""

from typing import Any, TypeVar, dataclass_transform

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Start a TMA copy from global to shared memory. `async_load` is its name in Triton 3.9."""

if hasattr(tma, "async_atomic_add"):
    async_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def async_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Start adding a tile in shared memory to global memory. Triton before 3.9 has the operation without a name."""
        offsets = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, offsets, src.handle)


memory = gl.shared_memory_descriptor
reinterpret = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
"""Shared memory with another dtype, shape and layout. `_reinterpret` is its name before Triton 3.9."""

VIEWS_GROW = gl.constexpr(triton.__version__.startswith(("3.6.", "3.7.")))
"""Whether `reinterpret` may give a view that is larger than the memory it is given. Triton refuses that since 3.8."""

ADDRESSES_ARE_HELD = gl.constexpr(not triton.__version__.startswith(("3.6.", "3.7.", "3.8.")))
"""Whether each address of an operand in shared memory is held in a register over a loop that does not change it."""


@builtin
def concat(values: Any, constants: Any, _semantic: Any = None) -> Any:
    """The tuple `values + constants`, of which `constants` is annotated as `gl.constexpr`.

    Since Triton 3.8 `+` turns the constants into plain ints, which the workers of `gl.warp_specialize` do not take.
    """
    # Triton before 3.8 has a constant that holds a tuple, later ones a tuple of constants.
    found = constants.value if isinstance(constants, gl.constexpr) else constants
    return gl.tuple([*values, *found])


T = TypeVar("T")


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """A class whose annotated fields are values of a kernel. Its constructor sets them in order, as in Triton 3.8."""
    if hasattr(gluon, "aggregate"):
        made: type[T] = gluon.aggregate(cls)
        return made
    from triton.language.core import _aggregate

    names = tuple(cls.__annotations__)

    def init(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # so the compiler calls it as its own
    cls.__init__ = init  # type: ignore[method-assign]
    made = _aggregate(cls)
    return made
