# SPDX-License-Identifier: Apache-2.0
"""What the modules of `torch.nn` share: attention ops that hold parameters, and defaults for their scalars."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.checks import check_dropout_p, check_int, fail


def axis(x: Tensor, index: int) -> Tensor:
    """The positions along one axis of `x`, in a shape that broadcasts to that of `x`."""
    return torch.arange(x.shape[index], device=x.device).view([-1 if i == index else 1 for i in range(x.dim())])


class AttentionModule(nn.Module):
    """An attention op with the tensors that it trains.

    Attributes:
        op: the op, a function of this package; `op.schedule` makes schedules for `schedule=`.
        entry: mask and score of the variant, in the words of its spec.
        sizes: the sizes that the constructor was given. scalars: the defaults for the op's scalars.
        dropout_p: the probability of dropout while training, of variants that have it.
    """

    op: ClassVar[Callable[..., Any]]
    entry: ClassVar[tuple[tuple[str, str], ...]] = ()
    # For each parameter the name of the op's argument, and the attribute that holds it.
    _held: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(
        self,
        sizes: Mapping[str, int] | None = None,
        scalars: Mapping[str, float | None] | None = None,
        dropout_p: float | None = None,
        sizing: Sequence[str] = (),
    ) -> None:
        """`sizing`: scalars that the shape of a parameter depends on."""
        super().__init__()
        name = type(self).__name__
        for key in sizing:
            check_int(name, key, scalars[key] if scalars else None)
        self.sizes = {key: check_int(name, key, size, minimum=1) for key, size in (sizes or {}).items()}
        self.scalars = {key: value for key, value in (scalars or {}).items() if value is not None}
        self.dropout_p = None if dropout_p is None else check_dropout_p(name, dropout_p)

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
        """The op's result. Keyword arguments of the op in `call` take precedence over the module's defaults.

        Raises:
            ArgumentError: an argument that the module holds, or one that the op refuses.
        """
        own: dict[str, Any] = {name: getattr(self, attribute) for name, attribute in self._held}
        for name, attribute in self._held:
            if name in call:
                expected = f"nothing in a call: the module holds it as its parameter {attribute}"
                fail(type(self).__name__, name, expected, type(call[name]).__name__)
        if self.dropout_p is not None:
            own["dropout_p"] = self.dropout_p if self.training else 0.0
        return self.op(q, k, v, **{**self.scalars, **own, **call})

    def extra_repr(self) -> str:
        """Sizes, defaults, and what the variant computes."""
        numbers = {**self.sizes, **self.scalars}
        if self.dropout_p is not None:
            numbers["dropout_p"] = self.dropout_p
        return ", ".join([*(f"{k}={v}" for k, v in numbers.items()), *(f"{k}: {text}" for k, text in self.entry)])
