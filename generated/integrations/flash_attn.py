# SPDX-License-Identifier: Apache-2.0
"""The functions of the package `flash_attn` 2.8, computed by the ops; `install` makes `import flash_attn` find them.

>>> install()
>>> from flash_attn import flash_attn_func
>>> from flash_attn.bert_padding import unpad_input
>>> import flash_attn
>>> flash_attn.__version__
'2.8.3+codegen'
>>> uninstall()

Served are `flash_attn_func`, `_qkvpacked_`, `_kvpacked_`, their `_varlen_` forms, `flash_attn_with_kvcache` and
`flash_attn.bert_padding`. To import anything else of the package raises `ImportError`: layers, losses, rotary
embeddings, and the private functions that return the state of its random generator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from . import flash_attn_interface, flash_attn_padding
from .flash_attn_cache import flash_attn_with_kvcache
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "VERSION",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

VERSION = "2.8.3+codegen"
"""The version of flash_attn whose functions these are, with this package as the local version label (PEP 440)."""

_NAME = "flash_attn"
_FUNCTIONS = {name: globals()[name] for name in __all__ if name.startswith(_NAME)}
_PADDING = {name: getattr(flash_attn_padding, name) for name in flash_attn_padding.__all__}


class _Distribution(Distribution):
    """The distribution that `importlib.metadata` reports: its name, its version and that it contains `flash_attn`."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": f"{_NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class _Finder:
    """The entry of `sys.meta_path` through which `importlib.metadata` finds the distribution. It finds no module."""

    @staticmethod
    def find_spec(_name: str, _path: Any = None, _target: Any = None) -> None:
        return None

    @staticmethod
    def find_distributions(context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        name = None if context is None else context.name
        if name is None or name.lower().replace("_", "-").replace(".", "-") == "flash-attn":
            yield _Distribution()


_FINDER: Any = _Finder()

_replaced: dict[str, Any] = {}
"""While installed: the replaced entries of `sys.modules`. Each of them was None, which forbids an import."""


def install() -> None:
    """Make `import flash_attn` find these functions, in this process.

    `sys.modules` gets `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding`, and
    `importlib.metadata` a distribution `flash-attn`, so that `importlib.util.find_spec`, a version check and
    `transformers.utils.is_flash_attn_2_available` find the package. transformers reads the metadata when it is
    imported, so call `install` before that. A second call changes nothing.

    Raises:
        RuntimeError: the real package, or part of it, is imported already: code that imported it would keep using it.
    """
    if _FINDER in sys.meta_path:
        return
    taken = sorted(name for name, x in sys.modules.items() if x is not None and name.partition(".")[0] == _NAME)
    if taken:
        where = getattr(sys.modules[taken[0]], "__file__", None)
        raise RuntimeError(
            f"install: flash_attn: expected a process that has not imported it, got {taken[0]} of {where}; "
            "call install() first"
        )
    modules = _modules()
    _replaced.update({name: None for name in modules if name in sys.modules})
    sys.modules.update(modules)
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo `install`: `import flash_attn` finds what it found before. Code that imported the functions keeps them."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name in (_NAME, f"{_NAME}.flash_attn_interface", f"{_NAME}.bert_padding"):
        sys.modules.pop(name, None)
    sys.modules.update(_replaced)
    _replaced.clear()


def _modules() -> dict[str, ModuleType]:
    """New modules by name, each with a spec. The submodules are also attributes of the package."""
    interface = _module(f"{_NAME}.flash_attn_interface", flash_attn_interface.__file__, _FUNCTIONS)
    padding = _module(f"{_NAME}.bert_padding", flash_attn_padding.__file__, _PADDING)
    contents = {**_FUNCTIONS, "__version__": VERSION, "flash_attn_interface": interface, "bert_padding": padding}
    package = _module(_NAME, __file__, contents)
    return {module.__name__: module for module in (package, interface, padding)}


def _module(name: str, file: str | None, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, f"`{name}` on the ops of {__name__.partition('.')[0]}.")
    is_package = "." not in name
    spec = ModuleSpec(name, None, origin=file, is_package=is_package)
    module.__spec__, module.__file__, module.__package__ = spec, file, spec.parent
    if is_package:
        # An empty search path, so that the import of any other submodule fails.
        module.__path__ = []
    module.__dict__.update(contents)
    return module
