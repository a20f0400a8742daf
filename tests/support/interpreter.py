"""Triton's interpreter without work that it repeats, or whose result it never uses.

Inside a kernel `tl.load` must mean the interpreter's, so a launch replaces each function of `triton.language`, and puts
the old one back at its end. The interpreter does the same at each call of a device function, `tl.max` among them: it
looks through the whole language, finds it replaced, and replaces some of it again. That is a third of its time.

Of the rest nearly half computes each sum, difference and product of integers once more in 64 bits, for an assertion
that only `debug` evaluates. Most of what then remains makes the type of a result, and the shape of a tensor, anew for
each operation.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], Any]
"""Replaces the language in the modules that a function sees; what it returns puts the old functions back."""


class LanguageOnce:
    """`patch`, but in each launch only at the first function that sees a module of the language."""

    def __init__(self, patch: Patch, modules: tuple[Any, ...], nothing: Callable[[], Any]) -> None:
        """`modules`: those of the language. `nothing`: makes the result of a `patch` that replaced nothing."""
        self._patch, self._modules, self._nothing = patch, modules, nothing
        self._replaced: set[int] | None = None  # by number in `modules`; None outside of launches
        self._seen: dict[tuple[int, int], frozenset[int]] = {}

    def __call__(self, function: Any) -> Any:
        if self._replaced is None:
            return self._patch(function)
        seen = self._modules_seen(function.__globals__)
        if seen and seen <= self._replaced:
            return self._nothing()
        self._replaced |= seen
        return self._patch(function)

    def launch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, which launches a kernel, as a launch."""

        def launch(*arguments: Any, **options: Any) -> Any:
            outer, self._replaced = self._replaced, set()
            try:
                return run(*arguments, **options)
            finally:
                self._replaced = outer

        return launch

    def _modules_seen(self, names: dict[str, Any]) -> frozenset[int]:
        # A module gains names, the language among them, when the interpreter rewrites its first function.
        key = id(names), len(names)
        if key not in self._seen:
            found = [value for value in names.values() if inspect.ismodule(value)]
            self._seen[key] = frozenset(i for i, each in enumerate(self._modules) if any(each is x for x in found))
        return self._seen[key]


def replace_language_once() -> None:
    """Have the interpreter replace the language once a launch, from now on."""
    from triton import language
    from triton.runtime import interpreter

    once = LanguageOnce(interpreter._patch_lang, (language, language.core), interpreter._LangPatchScope)
    interpreter._patch_lang = once
    executor = interpreter.GridExecutor
    executor.__call__ = once.launch(executor.__call__)


def omit_unread_overflow_checks() -> None:
    """Compute no overflow of integers where the interpreter has no assertion that reads it."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Make the attributes of each block type, and those of a tensor that its type decides, once."""
    from triton import language
    from triton.runtime import interpreter

    core = language.core
    core.block_type.__init__ = _remembered_block_type(core)
    core.tensor.__init__ = _remembered_tensor(core.tensor)
    core.dtype.__eq__ = _by_name(core.dtype.__eq__, core.dtype)
    interpreter._get_np_dtype = _remembered_numpy_type(interpreter._get_np_dtype)


def _remembered_block_type(core: Any) -> Callable[..., None]:
    make, block_type, constexpr = core.block_type.__init__, core.block_type, core.constexpr
    of_shape = (list, core.tuple)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        # A class that derives from it may have set more; another kind of shape is refused.
        if self.__class__ is not block_type or shape.__class__ not in of_shape:
            make(self, element_ty, shape)
            return
        key = (element_ty.name, *[size.value if isinstance(size, constexpr) else size for size in shape])
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            vars(self).update(known[key])
            self.element_ty = element_ty

    return init


def _remembered_tensor(tensor: Any) -> Callable[..., None]:
    make = tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if self.__class__ is not tensor:
            make(self, handle, type)
        elif type.name not in known:
            make(self, handle, type)
            known[type.name] = vars(self) | {"handle": None}  # its data is not kept alive
        else:
            vars(self).update(known[type.name])
            self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _by_name(equal: Callable[[Any, Any], Any], dtype: Any) -> Callable[[Any, Any], Any]:
    """`equal`, but of two scalar types, most of what is compared, the names alone."""

    def same(self: Any, other: Any) -> Any:
        return self.name == other.name if other.__class__ is dtype else equal(self, other)

    return same


def _remembered_numpy_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def found(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = find(tt_dtype)
        return known[name]

    return found
