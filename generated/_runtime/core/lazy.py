# SPDX-License-Identifier: Apache-2.0
"""Modules whose attributes are imported when they are first read (PEP 562): a package of any size imports fast.

No framework is imported.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

Hooks = tuple[Callable[[str], Any], Callable[[], list[str]]]
"""`__getattr__` and `__dir__` of a module."""


def lazy(module: str, sources: Mapping[str, str]) -> Hooks:
    """The hooks of a module whose attributes are defined in other modules.

    An attribute is imported when it is first read, and set: from then on it is an ordinary attribute of the module,
    which is read without a call of `__getattr__`.

    Args:
        module: the `__name__` of the module.
        sources: attribute -> its source, such as `"..causal.torch_op:causal"`, or `".nn"` for a module itself. Leading
            dots count from the module's package, as in a relative import.
    """

    def read(name: str) -> Any:
        source = sources.get(name)
        if source is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, attribute = source.partition(":")
        own = sys.modules[module]
        found = importlib.import_module(place, own.__package__)
        value = getattr(found, attribute) if attribute else found
        setattr(own, name, value)
        return value

    return read, lambda: sorted(sources)


def lazy_modules(package: str, *sources: str) -> Hooks:
    """The hooks of a package whose modules, given as relative names such as `".fwd"`, are imported when first read."""
    return lazy(package, {source.rpartition(".")[2]: source for source in sources})
