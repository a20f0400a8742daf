"""Expressions as mathematics: MathML Core, which browsers draw without a library.

>>> from codegen.ir.expr import compare, int_var
>>> MathPrinter().text(compare("ge", int_var("q_idx"), int_var("kv_idx")))
'<mrow><mi>i</mi><mo>≥</mo><mi>j</mi></mrow>'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from codegen.ir.expr import Const, Expr, Load, Op, Type, Var, is_const, names
from codegen.ir.printers.formula import FormulaPrinter

# Binding strength, loosest first. Mixed conjunctions and disjunctions get parentheses, so do all operations on bits.
LOGIC, NOT, COMPARE, BITS, MODULO, SUM, PRODUCT, FRACTION, ATOM = range(1, 10)

NAMESPACE = "http://www.w3.org/1998/Math/MathML"

SYMBOLS = {
    "q_idx": ("<mi>i</mi>", "position of the query"),
    "kv_idx": ("<mi>j</mi>", "position of the key"),
    "score": ("<mi>s</mi>", "score, scaled, in natural units"),
    "b": ("<mi>b</mi>", "batch row"),
    "h": ("<mi>h</mi>", "query head"),
    "hkv": ("<msub><mi>h</mi><mtext>kv</mtext></msub>", "key head"),
    "q_len": ("<msub><mi>N</mi><mtext>q</mtext></msub>", "number of queries"),
    "kv_len": ("<msub><mi>N</mi><mtext>kv</mtext></msub>", "number of keys"),
}
"""Name of the language -> its symbol, and its meaning."""

_LETTERS = {"i": "q_idx", "j": "kv_idx", "s": "score", "N": "q_len"}
"""Letter of a symbol -> the name of the language that loses the symbol if an argument of the spec has that letter."""

_INFIX = {
    "lt": ("&lt;", COMPARE),
    "le": ("≤", COMPARE),
    "gt": ("&gt;", COMPARE),
    "ge": ("≥", COMPARE),
    "eq": ("=", COMPARE),
    "ne": ("≠", COMPARE),
    "bitand": ("&amp;", BITS),
    "bitor": ("|", BITS),
    "bitxor": ("⊕", BITS),
    "shl": ("≪", BITS),
    "shr": ("≫", BITS),
}
"""Operators whose operands both bind tighter."""

_FENCES = {"abs": ("|", "|"), "floor": ("⌊", "⌋"), "ceil": ("⌈", "⌉")}

_FUNCTIONS = {"sigmoid": "<mi>σ</mi>", "log2": "<msub><mi>log</mi><mn>2</mn></msub>", "int": "<mi>trunc</mi>"}
"""Functions that are not written by their own name."""

_LONG = 24
"""Operations and operands of a conjunction that fits a line; a longer one has a row for each operand."""

_SHORT_INDEX = 3
"""Operations and operands of an index that may be a subscript; with a longer one, all stand in brackets."""

_DIGITS = 7
"""Significant digits to which a number with more digits is rounded."""


@dataclass
class MathPrinter:
    """Prints presentation MathML without the enclosing `<math>`.

    `plain` holds the names of the language that are printed as they are spelled in a spec (`plain_names`); `keywords`
    maps the name of a tensor or scalar to its name in the spec, where the two differ.
    """

    plain: Collection[str] = ()
    keywords: Mapping[str, str] = field(default_factory=dict)

    def text(self, e: Expr) -> str:
        """The expression as one element."""
        return self._print(e)[0]

    def rows(self, e: Expr) -> str:
        """The expression as one element; a long conjunction or disjunction has a row for each operand."""
        if not (isinstance(e, Op) and e.op in ("and", "or")) or e.size <= _LONG or self._members(e) is not None:
            return self.text(e)
        sign = _operator("∧" if e.op == "and" else "∨")
        rows = [_cells("" if n == 0 else sign, self.operand(a, LOGIC + 1)) for n, a in enumerate(e.args)]
        return _table(rows)

    def operand(self, e: Expr, strength: int) -> str:
        """A subexpression, in parentheses if it binds looser than `strength`."""
        text, own = self._print(e)
        return text if own >= strength else _fenced("(", text, ")")

    def _print(self, e: Expr) -> tuple[str, int]:
        if isinstance(e, Const):
            return _number(e.value)
        if isinstance(e, Var):
            return self._variable(e.name), ATOM
        if isinstance(e, Load):
            return self._load(e)
        assert isinstance(e, Op)
        if e.op in _INFIX:
            symbol, strength = _INFIX[e.op]
            sides = (self.operand(a, strength + 1) for a in e.args)
            return _row(next(sides), _operator(symbol), next(sides)), strength
        special: Callable[[Op], tuple[str, int]] | None = getattr(self, f"_print_{e.op}", None)
        return self._call(e) if special is None else special(e)

    # -------------------------------------------------------------------------------------------- names and elements

    def _variable(self, name: str) -> str:
        if name in SYMBOLS and name not in self.plain:
            return SYMBOLS[name][0]
        return f"<mi>{escape(self.keywords.get(name, name))}</mi>"

    def _load(self, e: Load) -> tuple[str, int]:
        tensor = f"<mi>{escape(self.keywords.get(e.tensor, e.tensor))}</mi>"
        if not e.indices:
            return tensor, ATOM
        indices = _separated([self.text(index) for index in e.indices])
        if all(map(_is_subscript, e.indices)):
            return f"<msub>{tensor}<mrow>{indices}</mrow></msub>", ATOM
        return _row(tensor, _fenced("[", indices, "]")), ATOM

    # ---------------------------------------------------------------------------------------------------- arithmetic

    def _print_neg(self, e: Op) -> tuple[str, int]:
        return _row(_operator("−"), self.operand(e.args[0], PRODUCT)), SUM

    def _print_add(self, e: Op) -> tuple[str, int]:
        a, b = e.args
        return _row(self.operand(a, SUM), _operator("+"), self.operand(b, SUM + 1)), SUM

    def _print_sub(self, e: Op) -> tuple[str, int]:
        a, b = e.args
        return _row(self.operand(a, SUM), _operator("−"), self.operand(b, SUM + 1)), SUM

    def _print_mul(self, e: Op) -> tuple[str, int]:
        factor, rest = e.args
        whole = _reciprocal(factor)
        if whole is not None:
            return f"<mfrac>{self.text(rest)}<mn>{whole}</mn></mfrac>", FRACTION
        base, exponent = _power(e)
        if exponent > 1:
            return f"<msup>{self.operand(base, ATOM)}<mn>{exponent}</mn></msup>", FRACTION
        return _row(self.operand(factor, PRODUCT), _operator("⋅"), self.operand(rest, PRODUCT)), PRODUCT

    def _print_div(self, e: Op) -> tuple[str, int]:
        above, below = (self.text(a) for a in e.args)
        return f"<mfrac>{above}{below}</mfrac>", FRACTION

    def _print_floordiv(self, e: Op) -> tuple[str, int]:
        return _fenced("⌊", self._print_div(e)[0], "⌋"), ATOM

    def _print_mod(self, e: Op) -> tuple[str, int]:
        a, b = (self.operand(a, PRODUCT) for a in e.args)
        return _row(a, '<mo lspace="0.25em" rspace="0.25em">mod</mo>', b), MODULO

    def _print_float(self, e: Op) -> tuple[str, int]:
        return self._print(e.args[0])

    def _print_exp2(self, e: Op) -> tuple[str, int]:
        return f"<msup><mn>2</mn>{self.text(e.args[0])}</msup>", FRACTION

    def _print_log1p(self, e: Op) -> tuple[str, int]:
        return _row("<mi>log</mi>", _fenced("(", f"<mn>1</mn><mo>+</mo>{self.operand(e.args[0], SUM + 1)}", ")")), ATOM

    def _print_pow(self, e: Op) -> tuple[str, int]:
        base, exponent = e.args
        return f"<msup>{self.operand(base, ATOM)}<mrow>{self.text(exponent)}</mrow></msup>", FRACTION

    def _print_sqrt(self, e: Op) -> tuple[str, int]:
        return f"<msqrt>{self.text(e.args[0])}</msqrt>", ATOM

    def _call(self, e: Op) -> tuple[str, int]:
        if e.op in _FENCES:
            left, right = _FENCES[e.op]
            return _fenced(left, self.text(e.args[0]), right), ATOM
        arguments = _separated([self.text(a) for a in e.args])
        return _row(_FUNCTIONS.get(e.op, f"<mi>{e.op}</mi>"), _fenced("(", arguments, ")")), ATOM

    # --------------------------------------------------------------------------------------------- logic and choices

    def _print_not(self, e: Op) -> tuple[str, int]:
        return _row(_operator("¬"), self.operand(e.args[0], ATOM)), NOT

    def _print_and(self, e: Op) -> tuple[str, int]:
        return _row(*_between("∧", [self.operand(a, LOGIC + 1) for a in e.args])), LOGIC

    def _print_or(self, e: Op) -> tuple[str, int]:
        members = self._members(e)
        if members is not None:
            first = e.args[0]
            assert isinstance(first, Op)
            member = self.operand(first.args[0], COMPARE + 1)
            return _row(member, _operator("∈"), _fenced("{", _separated(members), "}")), COMPARE
        return _row(*_between("∨", [self.operand(a, LOGIC + 1) for a in e.args])), LOGIC

    def _members(self, e: Op) -> list[str] | None:
        """The members that `x in (...)` lists: the right sides of a disjunction of equations with one left side."""
        equations = [a for a in e.args if isinstance(a, Op) and a.op == "eq"]
        if e.op != "or" or len(equations) < len(e.args) or len({a.args[0] for a in equations}) > 1:
            return None
        return [self.text(a.args[1]) for a in equations]

    def _print_where(self, e: Op) -> tuple[str, int]:
        arms = []
        rest: Expr = e
        while isinstance(rest, Op) and rest.op == "where":
            condition, value, rest = rest.args
            arms.append(_cells(self.text(value), f"<mtext>if&#xa0;</mtext>{self.text(condition)}"))
        arms.append(_cells(self.text(rest), "<mtext>otherwise</mtext>"))
        return _row('<mo stretchy="true" fence="true" form="prefix">{</mo>', _table(arms)), COMPARE


def plain_names(own: Collection[str]) -> frozenset[str]:
    """The names of the language that cannot be symbols beside a spec's `own` names of tensors and scalars.

    >>> sorted(plain_names({"i", "slope"}))
    ['q_idx']
    """
    taken = {name for letter, name in _LETTERS.items() if letter in own}
    return frozenset(taken | ({"kv_len"} if "q_len" in taken else set()))


def symbols(*exprs: Expr, plain: Collection[str] = ()) -> list[tuple[str, str]]:
    """The symbols that the expressions use, each with its meaning."""
    read = frozenset().union(*map(names, exprs))
    return [entry for name, entry in SYMBOLS.items() if name in read and name not in plain]


def math_element(content: str, alternative: str = "") -> str:
    """A formula of its own line; `alternative` is the text for a reader that draws no MathML."""
    alttext = f' alttext="{escape(alternative)}"' if alternative else ""
    return f'<math xmlns="{NAMESPACE}" display="block"{alttext}>{content}</math>'


def formula_element(e: Expr, printer: MathPrinter, before: str = "") -> str:
    """An expression as a formula of its own line, behind the elements `before`."""
    return math_element(_row(before, printer.rows(e)), FormulaPrinter(keywords=printer.keywords).text(e))


# -------------------------------------------------------------------------------------------------------------- pieces


def _row(*parts: str) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def _operator(symbol: str) -> str:
    return f"<mo>{symbol}</mo>"


def _fenced(left: str, inner: str, right: str) -> str:
    before, after = (f'<mo fence="true" form="{form}">' for form in ("prefix", "postfix"))
    return f"<mrow>{before}{left}</mo>{inner}{after}{right}</mo></mrow>"


def _separated(parts: Sequence[str]) -> str:
    return "<mo>,</mo>".join(parts)


def _between(symbol: str, parts: Sequence[str]) -> list[str]:
    first, *others = parts
    return [first, *(f"{_operator(symbol)}{part}" for part in others)]


def _table(rows: Sequence[str]) -> str:
    return f'<mtable displaystyle="true">{"".join(rows)}</mtable>'


def _cells(*cells: str) -> str:
    # MathML Core has no `columnalign`.
    found = "".join(f'<mtd style="text-align: left">{cell}</mtd>' for cell in cells)
    return f"<mtr>{found}</mtr>"


def _is_subscript(index: Expr) -> bool:
    return index.size <= _SHORT_INDEX and (not isinstance(index, Op) or index.op in ("add", "sub"))


def _number(value: float) -> tuple[str, int]:
    if isinstance(value, bool):
        return f"<mtext>{str(value).lower()}</mtext>", ATOM
    size = "<mi>∞</mi>" if abs(value) == math.inf else f"<mn>{_decimal(abs(value))}</mn>"
    return (_row(_operator("−"), size), SUM) if value < 0 else (size, ATOM)


def _decimal(value: float) -> str:
    """A number without a sign: whole floats without a fraction, long fractions cut, with an ellipsis."""
    if float(value).is_integer() and value < 1e16:
        return str(int(value))
    short = f"{value:.{_DIGITS}g}"
    text = short if float(short) == value else f"{short}…"
    return text if "e" not in text else repr(value)


def _reciprocal(e: Expr) -> int | None:
    """`n` if an expression is the float 1 / n, which stands for a division by the literal `n`; else None."""
    if not is_const(e) or e.type is not Type.FLOAT:
        return None
    assert isinstance(e, Const)
    if not 0 < e.value <= 0.5:
        return None
    whole = round(1 / e.value)
    return whole if 1 / whole == e.value else None


def _power(e: Expr) -> tuple[Expr, int]:
    """The base and the whole exponent of repeated products; (e, 1) for any other expression."""
    if not (isinstance(e, Op) and e.op == "mul"):
        return e, 1
    (a, n), (b, m) = map(_power, e.args)
    return (a, n + m) if a == b else (e, 1)
