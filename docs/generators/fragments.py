"""Tables for handwritten pages, which mark their places by a line such as `<!-- generated: language-functions -->`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
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
from generated._runtime.core import families as rules

PACKAGE = ROOT / "generated"
TUNED = PACKAGE / "tuned"

MODES = ("dense", "packed", "segmented")

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
    for folder in _folders():
        parts += [f"### {folder.name.upper()}", fence("\n".join(gains(PACKAGE, folder.name)), "text")]
    return "\n\n".join(parts)


def families() -> str:
    """For each GPU, the times of both kernel families at the longest compared length of its tuned files."""
    return "\n\n".join(f"### {folder.name.upper()}\n\n{_times_of(folder)}" for folder in _folders())


def _times_of(folder: Path) -> str:
    rows = []
    for variant, document in _tuned(folder):
        entries = [entry for entry in document.get("families", []) if _is_compared(entry)]
        for dim in sorted({entry["head_dim"] for entry in entries}):
            row = [variant, str(dim)]
            for which in ("fwd", "bwd"):
                found = [entry["ms"] for entry in entries if (entry["head_dim"], entry["pass"]) == (dim, which)]
                hopper, portable = (found[0].get("hopper"), found[0].get("portable")) if found else (None, None)
                row += [f"{ms:.3f}" if ms else "-" for ms in (hopper, portable)]
                row.append(f"{portable / hopper:.2f}" if hopper and portable else "-")
            rows.append(row)
    heads = ["variant", "D", "forward, Hopper, ms", "portable", "ratio", "backward, Hopper, ms", "portable", "ratio"]
    return figures(heads, rows)


def comparisons() -> str:
    """For each GPU and mode of calls: the variants whose families were compared, and how often the rule is right."""
    rows = []
    for gpu, mode, found in _measured("families"):
        right = sum(_confirms_the_rule(variant, entry) for variant, entry in found)
        rows.append([gpu, mode, _covered(found), str(len(found)), str(right)])
    return table(["GPU", "calls", "variants: columns of a head", "comparisons", "that confirm the rule"], rows)


def _confirms_the_rule(variant: str, entry: dict[str, Any]) -> bool:
    dims = entry["head_dim"], entry["head_dim"]
    ruled = rules.as_a_rule(entry["pass"], variant, entry["mode"], dims, entry["seq"])
    return rules.fastest(entry["ms"], ruled) == ruled


def tuned_tiles() -> str:
    """For each GPU and mode of calls: the variants whose portable kernels have tuned tiles in bfloat16."""
    rows = [[gpu, mode, _covered(found)] for gpu, mode, found in _measured("entries")]
    return table(["GPU", "calls", "variants: columns of a head"], rows)


Measurements = list[tuple[str, dict[str, Any]]]
"""Entries of tuned files, each with its variant."""


def _measured(part: str) -> Iterator[tuple[str, str, Measurements]]:
    """The entries in bfloat16 of a part of the tuned files, by GPU and mode of calls."""
    for folder, mode in product(_folders(), MODES):
        found = [
            (variant, entry)
            for variant, document in _tuned(folder)
            for entry in document.get(part, [])
            if (entry["mode"], entry["dtype"]) == (mode, "bfloat16")
        ]
        if found:
            yield folder.name.upper(), mode, found


def _covered(found: Measurements) -> str:
    """The variants of measurements, those with the same columns and passes together."""
    columns: dict[str, dict[str, set[int]]] = {}
    for variant, entry in found:
        columns.setdefault(variant, {}).setdefault(entry["pass"], set()).add(entry["head_dim"])
    variants: dict[str, list[str]] = {}
    for variant, of_passes in columns.items():
        passes: dict[str, list[str]] = {}
        for each, dims in sorted(of_passes.items()):
            passes.setdefault(", ".join(map(str, sorted(dims))), []).append(each)
        texts = [
            dims if names in (["bwd", "fwd"], ["dkdv", "dq", "fwd"]) else f"{' and '.join(names)} {dims}"
            for dims, names in passes.items()
        ]
        variants.setdefault(", ".join(texts), []).append(code(variant))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in variants.items())


def _folders() -> list[Path]:
    """The folders of tuned files, one for each GPU."""
    return sorted(path for path in TUNED.iterdir() if path.is_dir())


def _tuned(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The variants with a tuned file, and the file of each."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def _is_compared(entry: dict[str, Any]) -> bool:
    return (entry["dtype"], entry["seq"], entry["group"], entry["mode"]) == ("bfloat16", 16384, 1, "dense")


FRAGMENTS: dict[str, Callable[[], str]] = {
    "chips": chips,
    "comparisons": comparisons,
    "families": families,
    "language-functions": functions,
    "language-limits": limits,
    "language-names": names,
    "language-operators": operators,
    "language-precedence": precedence,
    "tuned-tiles": tuned_tiles,
    "tuning-gains": tuning_gains,
}
"""Name -> a function that returns the Markdown for that place."""
