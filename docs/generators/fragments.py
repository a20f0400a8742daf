"""Tables for handwritten pages, which mark their places by a line such as `<!-- generated: language-functions -->`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from codegen.arch.chips import CHIPS
from codegen.inspect.tuned_files import gains
from codegen.ir import descriptions
from codegen.ir.derive import derivative
from codegen.ir.expr import Expr, Type, Var, float_var
from codegen.ir.parse import Scope, parse
from codegen.ir.printers import FormulaPrinter
from docs.generators import ROOT
from docs.generators.markdown import code, fence, figures, table

PACKAGE = ROOT / "generated"
TUNED = PACKAGE / "tuned"

_PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def with_fragments(text: str) -> str:
    """A page with each marked place replaced by its table.

    Raises `ValueError` for a place whose name is not that of a table.
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


def tuning_gains() -> str:
    """For each tuned GPU, the text that `codegen explain --gpu` prints."""
    parts = []
    for folder in sorted(path for path in TUNED.iterdir() if path.is_dir()):
        parts += [f"### {folder.name.upper()}", fence("\n".join(gains(PACKAGE, folder.name)), "text")]
    return "\n\n".join(parts)


def families() -> str:
    """The times of both kernel families at the longest compared length of the tuned files, by variant and head dim."""
    rows = []
    for path in sorted((TUNED / "h100").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry for entry in document.get("families", []) if _is_compared(entry)]
        for dim in sorted({entry["head_dim"] for entry in entries}):
            row = [path.stem, str(dim)]
            for which in ("fwd", "bwd"):
                found = [entry["ms"] for entry in entries if (entry["head_dim"], entry["pass"]) == (dim, which)]
                hopper, portable = (found[0].get("hopper"), found[0].get("portable")) if found else (None, None)
                row += [f"{ms:.3f}" if ms else "-" for ms in (hopper, portable)]
                row.append(f"{portable / hopper:.2f}" if hopper and portable else "-")
            rows.append(row)
    heads = ["variant", "D", "forward, Hopper, ms", "portable", "ratio", "backward, Hopper, ms", "portable", "ratio"]
    return figures(heads, rows)


def _is_compared(entry: dict[str, Any]) -> bool:
    return (entry["dtype"], entry["seq"], entry["group"], entry["mode"]) == ("bfloat16", 16384, 1, "dense")


FRAGMENTS: dict[str, Callable[[], str]] = {
    "chips": chips,
    "families": families,
    "language-functions": functions,
    "language-limits": limits,
    "language-names": names,
    "language-operators": operators,
    "language-precedence": precedence,
    "tuning-gains": tuning_gains,
}
"""Name -> a function that returns the Markdown for that place."""
