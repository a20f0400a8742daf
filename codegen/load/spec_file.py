"""A spec file, read, checked and completed with the library's values: `variants.yaml` in, a `Spec` out.

>>> load("variants.yaml").variants["causal"].mask_text
'causal'
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codegen.ir.parse import Macro
from codegen.load.archs import read_archs, read_defaults
from codegen.load.grammar import FILE
from codegen.load.macros import read_macros
from codegen.load.variants import read_variants
from codegen.load.yaml_tree import Document, Item
from codegen.spec.model import ArchSpec, Defaults, Spec
from codegen.util.errors import Problem, SpecError
from codegen.util.shipped import shipped_path


@dataclass(frozen=True, kw_only=True)
class _Inherited:
    """The values that every file inherits from the library's."""

    defaults: Defaults = field(default_factory=Defaults)
    archs: Mapping[str, ArchSpec] = field(default_factory=dict)
    macros: Mapping[str, Macro] = field(default_factory=dict)


def load(path: str | os.PathLike[str], *, library: str | os.PathLike[str] | None = None) -> Spec:
    """Read a spec file; values that it lacks come from the file `library` (by default that of `default_spec_path`).

    Raises `SpecError` with every problem of the file, and of the library if that has any.
    """
    base = default_spec_path() if library is None else Path(library)
    inherited, problems = (_Inherited(), []) if _same_file(path, base) else _read_library(base)
    return _read_spec(Document(os.fspath(path)), inherited, problems)


def load_text(text: str, name: str) -> Spec:
    """The spec in a text that is not a file; error messages call it `name`. It inherits the library's values.

    Raises `SpecError` with every problem of the text.
    """
    return _read_spec(Document(name, text), *_read_library(default_spec_path()))


def _read_library(base: Path) -> tuple[_Inherited, list[Problem]]:
    """The values that other files inherit from the library's file, and the problems of that file."""
    doc = Document(os.fspath(base))
    shared = _read_shared(doc, doc.mapping(doc.root, tuple(FILE.fields)), _Inherited())
    return shared, doc.problems


def _read_spec(doc: Document, inherited: _Inherited, problems: Sequence[Problem]) -> Spec:
    sections = FILE.items(doc, doc.root)
    values = _read_shared(doc, sections, inherited)
    variants = {}
    if "variants" in sections:
        variants = read_variants(doc, sections["variants"], values.macros, values.archs)
    found = [*problems, *doc.problems]
    if found:
        raise SpecError(found)
    return Spec(path=doc.file, defaults=values.defaults, archs=values.archs, variants=variants)


def default_spec_path() -> Path:
    """The `variants.yaml` that comes with the generator: every other spec file inherits its values."""
    return shipped_path("variants.yaml")


def library_macros() -> tuple[str, ...]:
    """The names of masks and scores that every spec file inherits."""
    builtin = Document(os.fspath(default_spec_path()))
    return tuple(_read_shared(builtin, builtin.mapping(builtin.root, tuple(FILE.fields)), _Inherited()).macros)


def _read_shared(doc: Document, sections: Mapping[str, Item], inherited: _Inherited) -> _Inherited:
    """The values that apply to a file's variants: the inherited ones, overridden by its own."""
    defaults, archs = inherited.defaults, inherited.archs
    if "defaults" in sections:
        defaults = read_defaults(doc, sections["defaults"], defaults)
    if "archs" in sections:
        archs = read_archs(doc, sections["archs"], archs)
    return _Inherited(defaults=defaults, archs=archs, macros=read_macros(doc, sections, inherited.macros))


def _same_file(a: str | os.PathLike[str], b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except (OSError, ValueError):  # either is missing, which the reading reports; ValueError: a NUL byte in the path
        return False
