"""Rules for the names that a spec may give. Every function returns what is wrong with a name, or None."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping

from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, SCORE
from codegen.ir.parse import FUNCTIONS, INFINITY, Macro
from codegen.util.errors import did_you_mean

OP_ARGUMENTS = (
    "q",
    "k",
    "v",
    "scale",
    "layout",
    "return_lse",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
    "kv_lengths",
    "padding_id",
    "page_layout",
    "page_table",
    "page_starts",
    "max_seqlen_q",
    "max_seqlen_k",
    "splits",
    "q_scale",
    "k_scale",
    "v_scale",
    "values_in_keys",
    "q_offset",
    "config",
    "deterministic",
    "family",
    "schedule",
    "backward",
    "sink",
    "g",
    "prune",
    "g_base",
    "dropout_p",
    "seed",
    "dropout_origin",
)
"""Arguments that every op has, or that an op with a sink, decay or dropout has; and its `schedule` function."""

PACKAGE_NAMES = (
    "torch",
    "torch_parallel",
    "jax",
    "jax_nn",
    "jax_parallel",
    "nn",
    "float8",
    "packing",
    "paging",
    "integrations",
    "tuned",
    "manifest",
)
"""Names of the other files and folders beside the variants' folders in a generated package, in lower case."""

EXPORTED_NAMES = ("VARIANTS", "HANDLER", "RESIDUALS", "versions")
"""Names that the package and its modules of ops define besides the ops."""

IDENTIFIER = r"[A-Za-z][A-Za-z0-9_]*"
"""Names end up in file names, symbols and profiles: ASCII, and no leading underscore."""

LONGEST = 100
"""The most letters of a name. Names of files are longer by what the generator adds, and have 255 at most."""


def identifier_problem(name: str) -> str | None:
    if len(name) > LONGEST:
        return f"a name has at most {LONGEST} letters, got {len(name)}"
    if not re.fullmatch(IDENTIFIER, name):
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
        hint = f"; write '{plain}'" if name.isascii() and re.fullmatch(IDENTIFIER, plain) else ""
        return f"a name must be letters, digits and underscores and begin with a letter, got {name!r}{hint}"
    if keyword.iskeyword(name):
        return f"'{name}' is a Python keyword; choose another name"
    return None


def package_problem(name: str) -> str | None:
    """The name of a package's folder, by which Python imports it; it may begin with an underscore."""
    return identifier_problem(name.lstrip("_") or name)


def variant_problem(name: str) -> str | None:
    """A variant's name becomes a folder of the package and an op."""
    if name.lower() in PACKAGE_NAMES:
        return f"'{name}' is a module of the generated package; choose another name"
    if name in EXPORTED_NAMES:
        return f"'{name}' is a name of the generated package; choose another name"
    return identifier_problem(name)


def language_problem(name: str) -> str | None:
    """Whether the expression language has the name already."""
    if name in INDEX_NAMES:
        return f"'{name}' is an index name of every expression; choose another name"
    if name in LENGTH_NAMES:
        return f"'{name}' is a length of the call in every expression; choose another name"
    if name == INFINITY:
        return f"'{name}' is a number of the expression language; choose another name"
    if name == SCORE:
        return f"'{name}' is what a score expression transforms; choose another name"
    if name in FUNCTIONS or name == "where":
        return f"'{name}' is a function of the expression language; choose another name"
    return None


def macro_problem(name: str) -> str | None:
    """The name of a named mask or score, or of its parameter."""
    return identifier_problem(name) or language_problem(name)


def argument_problem(name: str, macros: Mapping[str, Macro]) -> str | None:
    """The name of a tensor or scalar, which becomes a keyword argument of the op."""
    if name in OP_ARGUMENTS:
        return f"'{name}' is an argument every op may have; choose another name"
    if name in macros:
        return f"'{name}' is the name of a mask or score; choose another name"
    return macro_problem(name)


def dim_problem(name: str) -> str | None:
    """A free size of a tensor; one spelled much like an index name is taken for a slip."""
    hint = did_you_mean(name.lower(), INDEX_NAMES)
    if hint:
        return f"unknown dim '{name}'{hint} (a free size needs a name less like {' '.join(INDEX_NAMES)})"
    if name in OP_ARGUMENTS:
        return f"'{name}' is an argument of the op and cannot name a size; the dims are {' '.join(INDEX_NAMES)}"
    return identifier_problem(name) or language_problem(name)
