"""Triton's interpreter without work that it repeats, or whose result it never uses, and without one of its errors.

Inside a kernel `tl.load` must mean the interpreter's function, so a launch replaces each function of `triton.language`,
and restores the old one at its end. The interpreter does the same at each call of a device function, `tl.max` among
them: it looks through the whole language, finds it replaced, and replaces some of it again. This takes a third of its
time.

Nearly half of the remaining time is spent on computing each sum, difference and product of integers once more in 64
bits, for an assertion that only `debug` evaluates. Most of the time after that is spent on making the type of a result
and the shape of a tensor anew for each operation, on looking for a common type of operands that have the same one, and
on finding the shape to which operands are broadcast.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], Any]
"""Replaces the language in the modules that a function sees; returns an object that restores the old functions."""


class LanguageOnce:
    """`patch`, but in each launch only at the first function that sees a module of the language."""

    def __init__(self, patch: Patch, modules: tuple[Any, ...], nothing: Callable[[], Any]) -> None:
        """`modules`: the modules of the language. `nothing`: makes the result of a `patch` that replaced nothing."""
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
        """Wrap `run`, which launches a kernel, to mark the beginning and the end of a launch."""

        def launch(*arguments: Any, **options: Any) -> Any:
            outer, self._replaced = self._replaced, set()
            try:
                return run(*arguments, **options)
            finally:
                self._replaced = outer

        return launch

    def _modules_seen(self, names: dict[str, Any]) -> frozenset[int]:
        # When the interpreter rewrites the first function of a module, the module gains names, such as the language.
        key = id(names), len(names)
        if key not in self._seen:
            found = [value for value in names.values() if inspect.ismodule(value)]
            self._seen[key] = frozenset(i for i, each in enumerate(self._modules) if any(each is x for x in found))
        return self._seen[key]


def replace_language_once() -> None:
    """From now on, let the interpreter replace the language only once per launch."""
    from triton import language
    from triton.runtime import interpreter

    once = LanguageOnce(interpreter._patch_lang, (language, language.core), interpreter._LangPatchScope)
    interpreter._patch_lang = once
    executor = interpreter.GridExecutor
    executor.__call__ = once.launch(executor.__call__)


def call_builtins_directly() -> None:
    """Find the functions of each module of the language once, not in each launch, and leave out their wrapper, which
    raises an error if they are called outside of a kernel."""
    from triton.runtime import interpreter

    known: dict[Any, list[tuple[str, Any, Any]]] = {}  # by module or class: name, the language's function, its stand-in

    def stand_in(function: Any, semantic: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        return called

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in known:
            semantic, is_builtin = interpreter.TritonSemantic(builder), interpreter.tl.core.is_builtin
            members = inspect.getmembers(package, is_builtin)
            known[package] = [(name, member, stand_in(inspect.unwrap(member), semantic)) for name, member in members]
        for name, member, called in known[package]:
            # A module that another function of the launch sees, too, is replaced already.
            if getattr(package, name) is member:
                scope.set_attr(package, name, called)

    interpreter._patch_builtin = patch


def omit_unread_overflow_checks() -> None:
    """Compute no overflow of integers if the interpreter has no assertion that reads the overflow."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def match_equal_types_at_once() -> None:
    """Skip the search for a common type of two operands of one type, or of a number and a type that holds it."""
    from triton.language import core, semantic

    kinds = semantic.TritonSemantic
    kinds.broadcast_impl_value = _broadcast_at_once(kinds.broadcast_impl_value, core)
    kinds.binary_op_type_checking_impl = _matched_at_once(kinds.binary_op_type_checking_impl, core.tensor)


def _broadcast_at_once(broadcast: Callable[..., Any], core: Any) -> Callable[..., Any]:
    """`broadcast`, which finds the result's shape and types only once for two types; then numpy repeats the elements
    without copying them."""
    import numpy as np
    from triton.runtime import interpreter

    tensor, block_type = core.tensor, core.block_type
    known: dict[tuple[str, str], tuple[Any, Any, tuple[int, ...]]] = {}  # the types, None if unchanged, and the shape

    def repeated(value: Any, type: Any, shape: tuple[int, ...]) -> Any:
        handle = value.handle
        scalar = handle.dtype.scalar
        data = handle.data
        if data.dtype != bool:
            data = data.astype(interpreter._get_np_dtype(scalar), copy=False)
        data = np.broadcast_to(data, shape)
        return tensor(interpreter.TensorHandle(data, scalar), type)

    def at_once(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.__class__ is not block_type and right.__class__ is not block_type:
            return lhs, rhs
        key = left.name, right.name
        if key not in known:
            lhs, rhs = broadcast(self, lhs, rhs)
            changed = [None if new.type is old else new.type for new, old in ((lhs, left), (rhs, right))]
            known[key] = (*changed, lhs.handle.data.shape)
            return lhs, rhs
        new_left, new_right, shape = known[key]
        if new_left is not None:
            lhs = repeated(lhs, new_left, shape)
        if new_right is not None:
            rhs = repeated(rhs, new_right, shape)
        return lhs, rhs

    return at_once


def _matched_at_once(match: Callable[..., Any], tensor: Any) -> Callable[..., Any]:
    def fits(number: Any, type: str) -> bool:
        if number.__class__ is int:
            return -(2**31) <= number < 2**31
        return number.__class__ is float and type == "fp32"

    def matched(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        left = lhs.type.scalar if lhs.__class__ is tensor else None
        right = rhs.type.scalar if rhs.__class__ is tensor else None
        known = right if left is None else left
        if known is None or known.name not in _KEPT_TYPES:
            return match(self, lhs, rhs, *flags, **named)
        if left is not None and right is not None:
            if lhs.type.name == rhs.type.name:
                return lhs, rhs
            if right.name == known.name:
                return self.broadcast_impl_value(lhs, rhs)
        elif named.get("arithmetic_check", True) and len(flags) < 3:
            if fits(rhs, known.name):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=known))
            if fits(lhs, known.name):
                return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=known), rhs)
        return match(self, lhs, rhs, *flags, **named)

    return matched


_KEPT_TYPES = frozenset({"int32", "int64", "fp32"})
"""The result of two operands of such a type has that type; so has that of one and an integer, and of float32 and a
float."""


def keep_truth_values() -> None:
    """Let a block of one condition have truth values, as other conditions have.

    Triton 3.6 makes numbers of the type that was compared. `&` of 64-bit ones and a condition on floats fails.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def kept(self: Any, ret_ty: Any, arg: Any) -> Any:
        made = splat(self, ret_ty, arg)
        return dataclasses.replace(made, data=made.data.astype(bool)) if arg.data.dtype == bool else made

    builder.create_splat = kept


def remember_types() -> None:
    """Make the attributes of each block type only once, and likewise those of a tensor that depend only on its type."""
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
        # A derived class may set more attributes; `make` refuses other kinds of shapes.
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
    """`equal`, but for two scalar types, the most frequent case, it compares only their names."""

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
