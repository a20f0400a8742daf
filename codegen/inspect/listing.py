"""The variants of a spec as text for a terminal, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import atomic_modes
from codegen.spec.model import Spec, Variant, describe_tensor

WIDEST = 120
"""The longest line, however wide the terminal is."""

_LABEL = 11
"""Columns before the text of a line, which hold its label."""


def as_json(spec: Spec) -> str:
    """The variants as a package's manifest lists them."""
    from codegen.render.manifest import manifest_entries

    return json.dumps(manifest_entries(spec), indent=2)


def as_text(spec: Spec, columns: int) -> str:
    """One paragraph per variant, wrapped to `columns`."""
    width = max(40, min(columns, WIDEST))
    return "\n\n".join("\n".join(_paragraph(variant, width)) for variant in spec.variants.values())


def _paragraph(variant: Variant, width: int) -> Iterator[str]:
    yield variant.name
    if variant.doc:
        yield from _filled(variant.doc, "  ", "  ", width)
    for label, text in _facts(variant):
        if text:
            yield from _filled(text, f"  {label:<{_LABEL - 2}}", " " * _LABEL, width)


def _facts(variant: Variant) -> Iterator[tuple[str, str]]:
    """Label and text of each property of a variant; the text is empty if the variant lacks it."""
    yield "mask", variant.mask_text
    yield "score", variant.score_text
    yield "tensors", ", ".join(map(describe_tensor, variant.tensors.values()))
    yield "scalars", ", ".join(f"{scalar.name}: {scalar.type.value}" for scalar in variant.scalars.values())
    extras = [name for name in ("decay", "dropout", "sink") if getattr(variant, name)]
    yield "extras", ", ".join([*extras, *_atomic(variant)])


def _atomic(variant: Variant) -> list[str]:
    """A word if gradients are added with atomics, with the modes if not all modes do so; empty if none does."""
    modes = [mode for mode in Mode if any(mode in found for found in atomic_modes(variant).values())]
    return [] if not modes else ["atomic"] if len(modes) == len(Mode) else [f"atomic in {' and '.join(modes)} calls"]


def _filled(text: str, first: str, others: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
