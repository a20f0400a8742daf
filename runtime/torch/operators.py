"""Launches as custom operators: what torch.compile, torch.export and fake tensors see in place of them."""

from collections.abc import Callable
from inspect import Signature
from typing import Any

from torch.library import custom_op

from ..core.options import CallOptions


def register_operator(
    name: str, launch: Callable[..., Any], fake: Callable[..., Any], signature: Signature
) -> Callable[..., Any]:
    """Register a custom operator that calls `launch`, which has this signature; return a function that calls it.

    `fake` allocates what `launch` returns. An operator takes no `CallOptions`: they pass as their text.
    """
    place = list(signature.parameters).index("options")

    def run(*args: Any) -> Any:
        return launch(*args[:place], CallOptions.parsed(args[place]), *args[place + 1 :])

    parameters = [x.replace(annotation=str) if x.name == "options" else x for x in signature.parameters.values()]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    registered = custom_op(name, run, mutates_args=())
    registered.register_fake(fake)

    def call(*args: Any) -> Any:
        return registered(*args[:place], args[place].text, *args[place + 1 :])

    return call
