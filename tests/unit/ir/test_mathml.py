"""MathML of expressions: every node kind, the parentheses of precedence, names, and layouts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from codegen.ir import expr
from codegen.ir.expr import Const, Load, Op, ScalarType, TensorSpec, Type, const, float_var, int_var
from codegen.ir.parse import FUNCTIONS, Scope, parse
from codegen.ir.printers import mathml
from codegen.ir.printers.mathml import MathPrinter, formula_element, plain_names, symbols
from codegen.load.spec_file import load
from tests.support.paths import ROOT

SCOPE = Scope(
    tensors={
        "bias": TensorSpec(name="bias", dims=("h", "distances")),
        "doc": TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32"),
        "chosen": TensorSpec(name="chosen", dims=("b", 3), dtype="int32"),
        "gain": TensorSpec(name="gain", dims=()),
    },
    scalars={"size": ScalarType.INT, "kernel_size": ScalarType.INT},
)


def text_of(element: ElementTree.Element) -> str:
    """MathML read aloud: fractions `[a / b]`, subscripts `a_b`, powers `a^b`, rows of a table separated by `;`."""
    tag, children = element.tag, [text_of(child) for child in element]
    if tag == "mfrac":
        return f"[{children[0]} / {children[1]}]"
    if tag in ("msub", "msup"):
        return f"{children[0]}{'_' if tag == 'msub' else '^'}{{{children[1]}}}"
    if tag == "msqrt":
        return f"√[{''.join(children)}]"
    if tag == "mtable":
        return "; ".join(children)
    spaced = tag == "mo" and element.get("fence") is None and element.text not in (",",)
    return f" {element.text} " if spaced else (element.text or "") + "".join(children)


def read(element: str) -> str:
    found = text_of(ElementTree.fromstring(element)).replace("\xa0", " ")
    return re.sub(r" +", " ", found).strip()


def printed(text: str, want: Type = Type.BOOL) -> str:
    return read(MathPrinter().text(parse(text, SCOPE, want)))


@pytest.mark.parametrize(
    ("text", "mathematics"),
    [
        ("q_idx >= kv_idx and q_idx - kv_idx < size", "i ≥ j ∧ i − j < size"),
        ("q_idx >= kv_idx or (b == 1 and h != 2)", "i ≥ j ∨ (b = 1 ∧ h ≠ 2)"),
        ("(q_idx > 1 or kv_idx > 1) and hkv <= 3", "(i > 1 ∨ j > 1) ∧ h_{kv} ≤ 3"),
        ("q_idx // size == kv_idx // size", "⌊[i / size]⌋ = ⌊[j / size]⌋"),
        ("(q_idx - kv_idx) % size == 0", "(i − j) mod size = 0"),
        ("q_idx % size % 4 == 0", "(i mod size) mod 4 = 0"),
        ("q_idx % 7 + 6 < size", "(i mod 7) + 6 < size"),
        ("q_idx - (kv_idx - size) > 0", "i − (j − size) > 0"),
        ("(q_idx + kv_idx) * size < 9", "size ⋅ (i + j) < 9"),
        ("-q_idx * size < -5", "− size ⋅ i < − 5"),
        ("doc[b, q_idx] == doc[b, kv_idx]", "doc_{b,i} = doc_{b,j}"),
        ("doc[b, q_idx // 2] == 1", "doc[b,⌊[i / 2]⌋] = 1"),
        ("kv_idx in chosen[b]", "j ∈ {chosen_{b,0},chosen_{b,1},chosen_{b,2}}"),
        ("(q_idx & 3) == 1", "i & 3 = 1"),
        ("((q_idx | 4) ^ kv_idx) == 1", "(i | 4) ⊕ j = 1"),
        ("(q_idx >> 2) == kv_idx", "i ≫ 2 = j"),
        ("abs(q_idx - kv_idx) <= kernel_size", "|i − j| ≤ kernel_size"),
        ("min(q_idx, 4) < max(kv_idx, size)", "min(i,4) < max(j,size)"),
        ("where(b == 0, q_idx >= kv_idx, kv_idx >= q_idx)", "{i ≥ jif b = 0; j ≥ iotherwise"),
        ("q_idx < q_len and kv_idx < kv_len", "i < N_{q} ∧ j < N_{kv}"),
    ],
)
def test_masks(text: str, mathematics: str) -> None:
    assert printed(text) == mathematics


@pytest.mark.parametrize(
    ("text", "mathematics"),
    [
        ("score + bias[h, q_idx - kv_idx]", "s + bias_{h,i − j}"),
        ("20.0 * tanh(score / 20.0)", "20 ⋅ tanh([s / 20])"),
        ("score ** 2", "s^{2}"),
        ("score ** 5", "s^{5}"),
        ("(score + 1) ** 2", "(s + 1)^{2}"),
        ("score ** 0.5", "√[s]"),
        ("(score + 1) ** -1.5", "(s + 1)^{ − 1.5}"),
        ("1 / (score - 1)", "[1 / s − 1]"),
        ("score * 0.1602994", "0.1602994 ⋅ s"),
        ("score / 512.5", "0.00195122… ⋅ s"),
        ("score - (gain - 1.5)", "s − (gain − 1.5)"),
        ("score - -gain", "s + gain"),
        ("-(score + gain)", "− (s + gain)"),
        ("-score * gain", "− gain ⋅ s"),
        ("exp(-abs(score))", "exp( − |s|)"),
        ("exp2(score) + log2(score) + log1p(score)", "2^{s} + log_{2}(s) + log(1 + s)"),
        ("sigmoid(score) + relu(score) + erf(score)", "σ(s) + relu(s) + erf(s)"),
        ("clamp(score, -1, 1)", "clamp(s, − 1,1)"),
        ("floor(score) + ceil(score) + round(score)", "⌊s⌋ + ⌈s⌉ + round(s)"),
        ("score + int(gain)", "s + trunc(gain)"),
        ("score * (q_idx - kv_idx)", "s ⋅ (i − j)"),
        ("where(score > 0, 1.0, where(score > -1, score, 2.0)) + 1", "({1if s > 0; sif s > − 1; 2otherwise) + 1"),
    ],
)
def test_scores(text: str, mathematics: str) -> None:
    assert printed(text, Type.FLOAT) == mathematics


def test_every_function_of_the_language_is_printed() -> None:
    for name, (fewest, _, build) in FUNCTIONS.items():
        e = build(*(float_var(f"x{n}") for n in range(fewest)))
        ElementTree.fromstring(MathPrinter().text(e))
        assert name  # each was built and printed


def test_every_operation_of_the_ir_is_printed() -> None:
    unary = [*expr.FLOAT_FUNCTIONS, *expr.ROUNDINGS, "neg", "abs", "relu", "float", "int", "not"]
    binary = [*expr.COMPARISONS, "add", "sub", "mul", "div", "floordiv", "mod", "min", "max"]
    binary += ["bitand", "bitor", "bitxor", "shl", "shr", "and", "or"]
    x, y, z = (int_var(name) for name in "xyz")
    operands = {1: (x,), 2: (x, y), 3: (x, y, z)}
    for count, operations in ((1, unary), (2, binary), (3, ["where", "clamp", "and", "or"])):
        for op in operations:
            ElementTree.fromstring(MathPrinter().text(Op(Type.FLOAT, op, operands[count])))


def test_literals() -> None:
    printer = MathPrinter()
    assert read(printer.text(const(True))) == "true"
    assert read(printer.text(Const(Type.FLOAT, float("-inf")))) == "− ∞"
    assert read(printer.text(const(3.0))) == "3"
    assert read(printer.text(const(1 / 3))) == "0.3333333…"


def test_not_of_a_comparison_has_parentheses() -> None:
    assert read(MathPrinter().text(Op(Type.BOOL, "not", (expr.compare("lt", float_var("x"), float_var("y")),)))) == (
        "¬ (x < y)"
    )


def test_names_that_a_spec_takes_lose_their_symbol() -> None:
    plain = plain_names({"i", "s"})
    e = expr.compare("ge", int_var("q_idx"), int_var("i"))
    assert read(MathPrinter(plain=plain).text(e)) == "q_idx ≥ i"
    assert [meaning for _, meaning in symbols(e, plain=plain)] == []
    assert [meaning for _, meaning in symbols(e)] == ["position of the query"]


def test_keywords_and_escapes() -> None:
    load_node = Load(Type.FLOAT, "own_max", ())
    assert read(MathPrinter(keywords={"own_max": "max"}).text(load_node)) == "max"
    ElementTree.fromstring(MathPrinter().text(float_var("a<b&c")))


def test_a_long_conjunction_has_a_row_for_each_operand() -> None:
    text = " and ".join(f"(q_idx + {n}) % 7 < kv_idx" for n in range(4))
    e = parse(text, SCOPE, Type.BOOL)
    table = ElementTree.fromstring(MathPrinter().rows(e))
    assert table.tag == "mtable"
    assert len(table) == 4
    assert ElementTree.fromstring(MathPrinter().rows(expr.conjuncts(e)[0])).tag == "mrow"


@pytest.mark.parametrize("file", ["variants.yaml", "library.yaml"])
def test_every_formula_is_well_formed_with_known_elements(file: str) -> None:
    core = {"math", "mrow", "mi", "mn", "mo", "mtext", "mfrac", "msub", "msup", "msqrt", "mtable", "mtr", "mtd"}
    for variant in load(ROOT / file).variants.values():
        for e in (variant.mask, variant.score):
            if e is not None:
                element = ElementTree.fromstring(formula_element(e, MathPrinter()))
                tags = {node.tag.removeprefix(f"{{{mathml.NAMESPACE}}}") for node in element.iter()}
                assert tags <= core
                assert element.get("alttext")
