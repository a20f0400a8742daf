# SPDX-License-Identifier: Apache-2.0
"""Launches as custom operators: what torch.compile, torch.export and fake tensors see in place of them."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.library import custom_op

from ..core.options import CallOptions
from .lazy_operators import namespace_of as namespace_of


def register_operator(name: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a custom operator that calls `launch`; return a function with the parameters of `launch` that calls it.

    `fake` allocates what `launch` returns. An operator takes no `CallOptions`: they pass as their text.
    """
    signature = inspect.signature(launch)
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
