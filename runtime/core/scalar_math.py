"""Functions of Python numbers with the values that kernels compute, also where Python raises an error.

>>> log(0.0), divide(1.0, -0.0), sqrt(-1.0), exp(1000.0), integer(float("inf"))
(-inf, -inf, nan, inf, 2147483647)
"""

import builtins
import math
from collections.abc import Callable

_Function = Callable[[float], float]


def _extended(function: _Function, pole: float | None = None) -> _Function:
    """A function of `math`: -inf at its `pole`, inf where the result is too large, NaN where it has no value."""

    def value(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return -math.inf if x == pole else math.nan

    return value


def _of_finite(rounded: Callable[[float], int]) -> _Function:
    """A rounding, as a float: infinity and NaN stay what they are."""
    return lambda x: float(rounded(x)) if math.isfinite(x) else x


exp, exp2, sqrt = map(_extended, (math.exp, lambda x: 2.0**x, math.sqrt))  # Python 3.10 has no math.exp2
log, log2, log1p = _extended(math.log, 0.0), _extended(math.log2, 0.0), _extended(math.log1p, -1.0)
sin, cos, tan = map(_extended, (math.sin, math.cos, math.tan))
tanh, erf = math.tanh, math.erf
floor, ceil, round = _of_finite(math.floor), _of_finite(math.ceil), _of_finite(builtins.round)


def sigmoid(x: float) -> float:
    """`1 / (1 + exp(-x))`."""
    return 0.5 + 0.5 * math.tanh(0.5 * x)


def divide(a: float, b: float) -> float:
    """`a / b`. By zero it is infinite, and NaN for 0 / 0."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def integer(x: float) -> int:
    """The integer part of a number, cut to 32 bits as on a GPU; 0 for NaN."""
    return 0 if x != x else int(min(max(x, -(2**31)), 2**31 - 1))
