"""The frameworks that a variant's ops are rendered for, and how the source of their launches differs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from codegen.plan.code.host import HostCode, host


class Framework(StrEnum):
    """The framework that an op belongs to."""

    TORCH = "torch"
    JAX = "jax"

    def arange(self, size: str) -> HostCode:
        """The integers from 0 on and below a size."""
        if self is Framework.TORCH:
            return host("{}.arange({}, device={}.device)", "torch", size, "q")
        return host("{}.arange({})", "jnp", size)

    def reshaped(self, array: HostCode | str, shape: Sequence[int]) -> HostCode:
        """An array in another shape."""
        method = "view" if self is Framework.TORCH else "reshape"
        return host(f"{{}}.{method}({', '.join(map(str, shape))})", array)

    def filled(self, buffer: str) -> HostCode:
        """The array that a kernel has filled."""
        return host("{}" if self is Framework.TORCH else "{}.value()", buffer)

    def head_sums(self, buffer: str) -> HostCode:
        """The sums `[Hq]` of a filled buffer `[B, Hq, parts]`."""
        if self is Framework.TORCH:
            return host("{}({})", "head_sums", self.filled(buffer))
        return host("{}.sum((0, 2))", self.filled(buffer))

    def cast(self, array: HostCode, like: str) -> HostCode:
        """An array in the dtype of another."""
        method = "to" if self is Framework.TORCH else "astype"
        return host(f"{{}}.{method}({{}}.dtype)", array, like)

    def zeros(self, like: str) -> HostCode:
        """Float32 zeros of a tensor's shape."""
        if self is Framework.TORCH:
            return host("{}.new_zeros({}.shape)", "q", like)
        return host("{}.zeros({}.shape)", "jnp", like)
