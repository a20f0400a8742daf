"""Tables that pages written by hand hold a place for: `<!-- generated: language-functions -->` in a line of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

from codegen.arch.chips import CHIPS
from codegen.ir import descriptions
from codegen.ir.derive import derivative
from codegen.ir.expr import Expr, Type, Var, float_var
from codegen.ir.parse import Scope, parse
from codegen.ir.printers import FormulaPrinter
from docs.generators.markdown import code, table

_PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def with_fragments(text: str) -> str:
    """A page with its places filled.

    Raises `ValueError` for a place whose name there is no table of.
    """
    return _PLACE.sub(_filled, text)


def _filled(match: re.Match[str]) -> str:
    if match[1] not in FRAGMENTS:
        raise ValueError(f"<!-- generated: {match[1]} -->: there is no such table; there are {', '.join(FRAGMENTS)}")
    return FRAGMENTS[match[1]]()


def names() -> str:
    return table(["name", "meaning"], [[code(name), text] for name, text in descriptions.NAMES.items()])


def functions() -> str:
    rows = []
    for name, (call, text) in descriptions.FUNCTIONS.items():
        rows.append([code(call), text, code(_derivative(name, call))])
    return table(["function", "value", "derivative with respect to x"], rows)


def _derivative(name: str, call: str) -> str:
    """The derivative as the generator computes it."""
    bound: dict[str, Expr] = {each: float_var(each) for each in ("x", "y", "low", "high")}
    bound["condition"] = Var(Type.BOOL, "condition")
    e = parse(call.replace(", ...", ""), Scope(bound=bound), Type.INT if name == "int" else Type.FLOAT)
    return re.sub(
        r"\d\.\d{5,}", lambda number: f"{float(number[0]):.4g}", FormulaPrinter().text(derivative(e, float_var("x")))
    )


def operators() -> str:
    rows = [[code(symbol), *what] for symbol, what in descriptions.OPERATORS.items()]
    return table(["operator", "joins", "value"], rows)


def precedence() -> str:
    return "\n".join(f"{i}. {' '.join(map(code, level))}" for i, level in enumerate(descriptions.PRECEDENCE, 1))


def limits() -> str:
    return table(["of", "limit"], [list(row) for row in descriptions.LIMITS.items()])


def chips() -> str:
    """Every chip that kernels are rendered for."""
    rows = [
        [
            code(chip.name),
            ", ".join(chip.gpus).replace("_", " ").upper() or "-",
            f"{chip.shared_memory // 1024} KiB",
            code(chip.same_tiles_as) if chip.same_tiles_as else "its own",
            "`hopper` and `portable`" if chip.has_wgmma else "`portable`",
        ]
        for chip in CHIPS.values()
    ]
    return table(["chip", "GPUs", "shared memory of a program", "default tiles", "kernel families"], rows)


FRAGMENTS: dict[str, Callable[[], str]] = {
    "chips": chips,
    "language-functions": functions,
    "language-limits": limits,
    "language-names": names,
    "language-operators": operators,
    "language-precedence": precedence,
}
"""Name -> the Markdown in its place."""
