"""Triton's interpreter without work that it repeats.

Inside a kernel `tl.load` must mean the interpreter's, so a launch replaces each function of `triton.language`, and puts
the old one back at its end. The interpreter does the same at each call of a device function, `tl.max` among them: it
looks through the whole language, finds it replaced, and replaces some of it again. That is a third of its time.
"""

from __future__ import annotations

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
