"""The frameworks that a variant's ops are rendered for, and how the source of their launches differs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Framework(StrEnum):
    """What an op is an op of."""

    TORCH = "torch"
    JAX = "jax"

    def number(self, kind: str) -> str:
        """The annotation of a scalar inside launches: a number, or in JAX also an array of one."""
        return kind if self is Framework.TORCH else f"{kind} | Tensor"

    def arange(self, size: str) -> str:
        """Source of the numbers below a size."""
        return f"torch.arange({size}, device=q.device)" if self is Framework.TORCH else f"jnp.arange({size})"

    def reshaped(self, array: str, shape: Sequence[int]) -> str:
        sizes = ", ".join(map(str, shape))
        return f"{array}.view({sizes})" if self is Framework.TORCH else f"{array}.reshape({sizes})"

    def filled(self, buffer: str) -> str:
        """Source of the array that a kernel has filled."""
        return buffer if self is Framework.TORCH else f"{buffer}.value()"

    def cast(self, array: str, dtype: str) -> str:
        return f"{array}.to({dtype})" if self is Framework.TORCH else f"{array}.astype({dtype})"

    def zeros(self, like: str) -> str:
        """Source of float32 zeros of a tensor's shape."""
        return f"q.new_zeros({like}.shape)" if self is Framework.TORCH else f"jnp.zeros({like}.shape)"
