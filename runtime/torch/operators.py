"""The custom operators of the package, each registered when it is first looked up.

`torch.ops.<package>.<variant>_fwd` is defined by the launch module of the variant, which importing the package does not
import. Whoever looks an operator up in `torch.ops` gets it: `torch.export.load`, compiled code from a cache on disk,
graphs from a pickle. A program that finds operators by name in C++, as an AOTInductor package does, needs them to be
registered before: read `torch.ops.<package>.<variant>_fwd` and `_bwd` first.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

PASSES = ("_fwd", "_bwd")
MODES = {"": "", "_packed": ".packed", "_segmented": ".segmented"}
"""What a mode of calls adds to the name of an operator -> the package of its launch module, in that of the variant."""


def namespace_of(package: str) -> str:
    """The namespace of the operators of a package: two packages can live in one process.

    >>> namespace_of("generated"), namespace_of("my_model.attention")
    ('generated', 'my_model_attention')
    """
    return package.replace(".", "_")


def register_when_read(package: str, variants: Sequence[str]) -> None:
    """Make `torch.ops.<package>` import the launch module of an operator when the operator is first read."""
    namespace: Any = getattr(torch.ops, namespace_of(package))
    kind = type(namespace)
    modules = {
        f"{variant}{mode}{name}": f"{package}.{variant}{folder}.torch_launch"
        for variant in variants
        for mode, folder in MODES.items()
        for name in PASSES
    }

    class LazyOperators(kind):  # type: ignore[misc, valid-type]
        """A namespace of operators that are registered when they are first read."""

        def __getattr__(self, name: str) -> Any:
            if name in modules:
                importlib.import_module(modules[name])
            return super().__getattr__(name)

    namespace.__class__ = LazyOperators
