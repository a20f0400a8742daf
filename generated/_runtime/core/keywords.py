# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments that the code of a function calls by other names. No framework is imported."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def keywords(**names: str) -> Callable[[Callable[..., Any]], Any]:
    """Give a function's parameters other names, by which they are passed: each name, and the parameter's own.

    A name that is a parameter's own, too, still is that parameter's.
    """

    def renamed(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        own = {name: to for name, to in names.items() if name not in signature.parameters}
        public = {to: name for name, to in own.items()}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{own.get(name, name): value for name, value in kwargs.items()})

        parameters = [x.replace(name=public.get(x.name, x.name)) for x in signature.parameters.values()]
        call.__dict__["__signature__"] = signature.replace(parameters=parameters)
        return call

    return renamed
