"""What a variant computes, as formulas in MathML: the mask, the score, and what is special in its softmax."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.printers.mathml import MathPrinter, formula_element, math_element, plain_names, symbols
from codegen.spec.model import Variant


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula with a label of one or two words; `element` is a MathML element `<math>`."""

    label: str
    element: str


_MAPS_TO = '<mi>s</mi><mo stretchy="false">↦</mo>'

_ALWAYS = "<mtext>every query attends to every key</mtext>"

_DECAY = (
    f"{_MAPS_TO}<mi>s</mi><mo>+</mo>"
    "<munderover><mo>∑</mo><mrow><mi>t</mi><mo>=</mo><mi>j</mi><mo>+</mo><mn>1</mn></mrow><mi>i</mi></munderover>"
    "<msub><mi>g</mi><mrow><mi>b</mi><mo>,</mo><mi>t</mi><mo>,</mo><mi>h</mi></mrow></msub>"
)

_SCORE_IJ = "<msub><mi>s</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub>"
_SCORE_IL = "<msub><mi>s</mi><mrow><mi>i</mi><mi>l</mi></mrow></msub>"

_SINK = (
    "<msub><mi>p</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub><mo>=</mo>"
    f"<mfrac><mrow><mi>exp</mi><mo>(</mo>{_SCORE_IJ}<mo>)</mo></mrow>"
    "<mrow><mi>exp</mi><mo>(</mo><msub><mi>sink</mi><mi>h</mi></msub><mo>)</mo><mo>+</mo>"
    f"<munder><mo>∑</mo><mi>l</mi></munder><mi>exp</mi><mo>(</mo>{_SCORE_IL}<mo>)</mo></mrow></mfrac>"
)

_DROPOUT = (
    "<mi>p</mi><mo>↦</mo><mrow><mo>{</mo><mtable>"
    "<mtr><mtd><mn>0</mn></mtd><mtd><mtext>with probability&#xa0;</mtext><mi>dropout_p</mi></mtd></mtr>"
    "<mtr><mtd><mi>p</mi><mo>/</mo><mo>(</mo><mn>1</mn><mo>−</mo><mi>dropout_p</mi><mo>)</mo></mtd>"
    "<mtd><mtext>otherwise</mtext></mtd></mtr></mtable></mrow>"
)


def formulas(variant: Variant) -> list[Formula]:
    """The formulas of the mask, of the score if the variant changes it, and of a decay, a sink and dropout."""
    printer = _printer(variant)
    mask = math_element(_ALWAYS) if variant.mask is None else formula_element(variant.mask, printer)
    found = [Formula(label="mask", element=mask)]
    if variant.score is not None:
        before = "<mi>score</mi><mo>↦</mo>" if "score" in printer.plain else _MAPS_TO
        found.append(Formula(label="score", element=formula_element(variant.score, printer, before)))
    for label, element in (("decay", _DECAY), ("sink", _SINK), ("dropout", _DROPOUT)):
        if getattr(variant, label):
            found.append(Formula(label=label, element=math_element(f"<mrow>{element}</mrow>")))
    return found


def legend(variant: Variant) -> list[tuple[str, str]]:
    """The symbols in the formulas of mask and score as MathML, each with its meaning."""
    exprs = [e for e in (variant.mask, variant.score) if e is not None]
    found = symbols(*exprs, plain=_printer(variant).plain)
    return [(f"<math>{symbol}</math>", meaning) for symbol, meaning in found]


def _printer(variant: Variant) -> MathPrinter:
    return MathPrinter(plain=plain_names({*variant.tensors, *variant.scalars}))
