"""All that the gallery says of one variant, gathered from the spec files, the generator and the rendered package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from codegen.inspect.entries import entry_text
from codegen.inspect.kinds import KINDS, kinds
from codegen.inspect.mathematics import Formula, formulas, legend
from codegen.inspect.portrait import Portrait, draw
from codegen.inspect.usage import jax_call, torch_call
from codegen.load.spec_file import load
from codegen.plan.kernel_files import PAGED, PORTABLE
from codegen.spec.model import Variant
from docs.gallery.facts import ON_CANVAS, sources, view_of

ROOT = Path(__file__).resolve().parents[2]

SHIPPED, LIBRARY = "variants.yaml", "library.yaml"
PACKAGES = {SHIPPED: "generated", LIBRARY: "attention"}
"""Spec file -> the package that its kernels are imported from. The library's is rendered by whoever uses it."""

IMAGE = "image"
ALL_KINDS = KINDS | {IMAGE: "positions lie on a canvas, in images or video"}
"""Kind -> what it says."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One variant of the gallery. `kernels` are paths below the checkout, none where nothing is rendered."""

    variant: Variant
    file: str
    kinds: list[str]
    formulas: list[Formula]
    legend: list[tuple[str, str]]
    portrait: Portrait
    sources: list[tuple[str, str]]
    entry: str
    torch_call: str
    jax_call: str
    kernels: list[str]

    @property
    def name(self) -> str:
        """The name of the variant, by which its page is called."""
        return self.variant.name

    @property
    def show_command(self) -> str:
        """The command that prints the numbers of the card."""
        spec = "" if self.file == SHIPPED else f" --variants {self.file}"
        view = self.portrait.view
        sizes = "" if view.q_len == 1024 else f" --q-len {view.q_len} --block {view.block_m}"
        return f"python -m codegen show {self.name}{spec}{sizes}"


def cards() -> list[Card]:
    """A card for each variant of both spec files, in their order."""
    return [card for file in (SHIPPED, LIBRARY) for card in _cards_of(file)]


def _cards_of(file: str) -> Iterable[Card]:
    text = (ROOT / file).read_text(encoding="utf-8")
    package = PACKAGES[file]
    for variant in load(ROOT / file).variants.values():
        yield Card(
            variant=variant,
            file=file,
            kinds=[*kinds(variant), *([IMAGE] if variant.name.startswith(ON_CANVAS) else [])],
            formulas=formulas(variant),
            legend=legend(variant),
            portrait=draw(variant, view_of(variant)),
            sources=sources(variant),
            entry=entry_text(text, variant, with_macros=file != SHIPPED),
            torch_call=torch_call(variant, package),
            jax_call=jax_call(variant, package),
            kernels=_kernels(variant) if file == SHIPPED else [],
        )


def _kernels(variant: Variant) -> list[str]:
    """The kernels and ops of a rendered variant: those of dense calls, and the kernels on paged caches."""
    folder = ROOT / PACKAGES[SHIPPED] / variant.name
    paths = [*sorted(folder.glob("*.py")), *folder.glob(f"{PAGED}/{PORTABLE}.py")]
    return [path.relative_to(ROOT).as_posix() for path in paths if path.name != "__init__.py"]
