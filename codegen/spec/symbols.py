"""Symbols in generated code for a variant's function, tensors and scalars whose names that code uses itself."""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, TensorSpec, Var, int_var
from codegen.spec.model import Variant
from codegen.spec.reserved import is_reserved, is_word

IMPORTED_NAMES = ("torch", "jax", "jnp", "triton", "tl", "gl", "np", "math")
"""Modules that generated code imports."""

_DERIVED = "heads|rows|cols|pairs|atomic"
"""Endings of the names of a tensor's gradient sums: `codegen.analysis.gradients.GradientTerm.accumulator`."""


def symbolised(variant: Variant) -> Variant:
    """The variant with symbols for those of its tensors and scalars whose names generated code uses itself.

    The op's keyword arguments keep the names of the spec, to which `keywords` maps the symbols.
    """
    names = (*variant.tensors, *variant.scalars)
    symbols: dict[str, str] = {}
    flags: set[str] = set()
    for name in names:
        is_trained = name in variant.tensors and variant.tensors[name].grad
        # Each trained tensor has a flag GRAD_NAME: two names that differ only in case would share one flag.
        if is_used(name) or _is_derived(name, variant) or (is_trained and name.upper() in flags):
            symbols[name] = _symbol(name, {*names, *symbols.values()})
        if is_trained:
            flags.add(symbols.get(name, name).upper())
    if not symbols:
        return variant

    def renamed(e: Expr) -> Expr | None:
        if isinstance(e, Var):
            return replace(e, name=symbols.get(e.name, e.name))
        if isinstance(e, Load):
            indices = tuple(expr.rebuild(index, renamed) for index in e.indices)
            return replace(e, tensor=symbols.get(e.tensor, e.tensor), indices=indices)
        return None

    def whole(e: Expr | None) -> Expr | None:
        return None if e is None else expr.rebuild(e, renamed)

    def computed(tensor: TensorSpec) -> tuple[tuple[str, Expr], ...]:
        # A dim may have the name of a tensor: of the names that sizes read, scalars alone are renamed.
        of_scalars = {name: int_var(symbol) for name, symbol in symbols.items() if name in variant.scalars}
        return tuple((text, expr.substitute(size, of_scalars)) for text, size in tensor.computed)

    tensors = [
        replace(tensor, name=symbols.get(name, name), computed=computed(tensor))
        for name, tensor in variant.tensors.items()
    ]
    scalars = [replace(scalar, name=symbols.get(name, name)) for name, scalar in variant.scalars.items()]
    return replace(
        variant,
        mask=whole(variant.mask),
        score=whole(variant.score),
        tensors={tensor.name: tensor for tensor in tensors},
        scalars={scalar.name: scalar for scalar in scalars},
        keywords={symbol: name for name, symbol in symbols.items()},
    )


def function_symbol(name: str) -> str:
    """The name of an op's function in its module.

    >>> function_symbol("causal"), function_symbol("max"), function_symbol("reference")
    ('causal', 'own_max', 'own_reference')
    """
    if not is_word(name) and not _is_foreign(name):
        return name
    return f"own_{name}_op" if is_word(f"own_{name}") else f"own_{name}"


def is_renamed(name: str) -> bool:
    """Whether an op's function has another name in its module."""
    return function_symbol(name) != name


def imported_op(name: str) -> str:
    """The import of an op's function from its module, under the op's name.

    >>> imported_op("causal"), imported_op("max")
    ('causal', 'own_max as max')
    """
    return f"{function_symbol(name)} as {name}" if is_renamed(name) else name


def by_number(names: Iterable[str]) -> list[str]:
    """Names in the order that linters want for `__all__`: numbers in them are sorted by value.

    >>> by_number(["level10", "level2", "a"])
    ['a', 'level2', 'level10']
    """
    return sorted(
        names, key=lambda name: [(not w.isdigit(), int(w) if w.isdigit() else 0, w) for w in re.split(r"(\d+)", name)]
    )


FILTERS = {"by_number": by_number, "function_symbol": function_symbol, "imported_op": imported_op}
"""Filters of the templates."""


def _symbol(name: str, taken: Collection[str]) -> str:
    symbol = f"own_{name}"
    others = {other.upper() for other in taken}
    while is_reserved(symbol) or symbol.upper() in others:
        symbol += "_arg"
    return symbol


def is_used(name: str) -> bool:
    """Whether generated code uses the name itself.

    >>> is_used("span"), is_used("max"), is_used("torch"), is_used("slope")
    (True, True, True, False)
    """
    return is_reserved(name) or _is_foreign(name)


def _is_foreign(name: str) -> bool:
    return name in IMPORTED_NAMES or hasattr(builtins, name)


def _is_derived(name: str, variant: Variant) -> bool:
    """Whether the name is that of another argument's gradient, or of sums from which that gradient is made."""
    others = "|".join(other for other in (*variant.tensors, "sink", "g") if other != name)
    return re.fullmatch(rf"d({others})(_({_DERIVED})(_\d+)?)?", name) is not None
