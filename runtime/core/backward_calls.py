"""The arguments of an op's `backward`, which takes the arguments of the op. No framework is imported."""

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Any

from .checks import check_layout, fail, is_choice, shown

_OWN = ("run", "q", "k", "v", "return_lse")
"""Parameters of `call` that `backward` does not take as keywords."""


@cache
def keyword_names(op: Any) -> Mapping[str, str]:
    """Each keyword of an op, and the name of its parameter in the op's code."""
    public, own = inspect.signature(op).parameters, inspect.signature(inspect.unwrap(op)).parameters
    return dict(zip(public, own, strict=True))


def shown_as(function: Callable[..., Any], source: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """`function` as the `backward` of an op: `help` shows it with the parameters and the docstring of `source`.

    The first parameter of `source` is the op's entry, which callers do not pass.
    """
    signature = inspect.signature(source)
    parameters = list(signature.parameters.values())[1:]
    function.__dict__["__signature__"] = signature.replace(parameters=parameters)
    function.__doc__ = source.__doc__
    # Under this name it is pickled.
    function.__module__, function.__name__ = op.__module__, "backward"
    function.__qualname__ = f"{op.__name__}.backward"
    return function


class BackwardEntry:
    """What an op's `backward` knows of its op. It takes the keywords of the op that `call(run, q, k, v, ...)` takes.

    Signatures are inspected when the op is defined: otherwise torch.compile would trace that in each compiled call.

    Attributes:
        op: name of the op.
        call: computes the op; its `run` may compute gradients instead.
        names: each keyword of the op, and the name of its parameter in the op's code.
        defaults: the op's default for each parameter of `call`, by the parameter's name in the op's code.
    """

    def __init__(self, op: Any, call: Callable[..., Any]) -> None:
        self.op: str = op.__name__
        self.call = call
        self.names = keyword_names(op)
        parameters = inspect.signature(inspect.unwrap(op)).parameters
        taken = inspect.signature(call).parameters
        self.defaults = {name: parameters[name].default for name in taken if name not in _OWN}

    def arguments(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the op would pass to `call` after q, k and v, by parameter name."""
        for name in keywords:
            if self.names.get(name) not in self.defaults:
                known = ", ".join(each for each, own in self.names.items() if own in self.defaults)
                fail(f"{self.op}.backward", name, f"one of {known}", "an argument of that name")
        given = {**self.defaults, **{self.names[name]: x for name, x in keywords.items()}}
        check_layout(self.op, given["layout"])
        given["q_offset"] = 0 if given["q_offset"] is None else given["q_offset"]
        return given

    def wanted(self, wanted: Sequence[str] | None, gradients: Sequence[str]) -> list[str]:
        """The names, in the op's code, of those of a variant's `gradients` that are wanted; all by default."""
        known = {name: own for name, own in self.names.items() if own in gradients}
        expected = f"names among {', '.join(known) or 'none'}"
        if wanted is not None and (isinstance(wanted, str) or not isinstance(wanted, (Sequence, Set))):
            fail(f"{self.op}.backward", "wanted", f"None or a sequence of {expected}", shown(wanted))
        for name in wanted or ():
            if not is_choice(name, known):
                fail(f"{self.op}.backward", "wanted", expected, shown(name))
        return [own for name, own in known.items() if wanted is None or name in wanted]

    def check_result(self, x: Any, name: str, shape: Sequence[int], dtype: str = "") -> None:
        """Raise an error unless `x` looks like a result of the op: floats of this shape, and of a dtype if that is
        fixed."""
        got_shape, got_dtype = list(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__))
        are_floats = got_dtype.removeprefix("torch.").startswith(("float", "bfloat"))
        if got_shape != list(shape) or not got_dtype.endswith(dtype) or not are_floats or not hasattr(x, "dtype"):
            expected = f"as the op returns it, {dtype or 'floats'} {list(shape)}"
            fail(f"{self.op}.backward", name, expected, f"{got_dtype} {got_shape}")
