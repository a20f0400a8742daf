"""A translated mask and score as an entry of a spec: declarations guessed from use, and the YAML text."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from codegen.ir.expr import INDEX_NAMES
from codegen.port.values import LANGUAGE_NAMES, Captured, Kind
from codegen.spec.names import argument_problem, dim_problem

WIDTH = 110
_MADE = {
    "randn": Kind.FLOAT,
    "rand": Kind.FLOAT,
    "linspace": Kind.FLOAT,
    "Parameter": Kind.FLOAT,
    "Embedding": Kind.FLOAT,
    "arange": Kind.INT,
    "randint": Kind.INT,
    "cumsum": Kind.INT,
    "repeat_interleave": Kind.INT,
}
_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "int32": "int32",
    "int": "int32",
    "int64": "int64",
    "long": "int64",
    "bool": "bool",
}
_OF_KIND = {Kind.INT: "int32", Kind.BOOL: "bool", Kind.FLOAT: "float32", Kind.UNKNOWN: "float32"}


@dataclass(frozen=True)
class Formula:
    """The expressions of one entry, with the guessed kinds of captured names and the names that were seen."""

    mask: ast.expr | None
    score: ast.expr | None
    guesses: Mapping[str, Kind]
    seen: Mapping[str, Captured]

    def captured(self, key: str) -> Captured:
        """The captured value of a key."""
        return self.seen.get(key, Captured(key))


@dataclass
class Entry:
    """An entry of `variants:`; `notes` say what was guessed, and what a reader must compare with the original."""

    name: str
    doc: str
    mask: str = ""
    score: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class DeclarationError(Exception):
    """A captured name cannot be declared."""


def make_entry(name: str, doc: str, formula: Formula, macros: Collection[str]) -> Entry:
    """The entry of a formula. Raises `DeclarationError` if a name is used in ways that no declaration allows."""
    entry = Entry(name=name, doc=doc)
    written = {key: part for key, part in (("mask", formula.mask), ("score", formula.score)) if part is not None}
    symbols = _symbols(_Uses(written.values()).names, formula, macros, entry)
    renamed = _Renamed(symbols)
    parts = {key: renamed.visit(_copy(part)) for key, part in written.items()}
    uses = _Uses(parts.values())
    floats = _among_floats(parts.values())
    olds = {symbol: old for old, symbol in symbols.items()}
    for symbol, subscripts in uses.tensors.items():
        if symbol in uses.scalars:
            path = formula.captured(olds[symbol]).path
            raise DeclarationError(f"'{path}' is indexed in one place and used as a number in another")
        entry.tensors[symbol] = _tensor(olds[symbol], symbol, subscripts, formula, entry)
    for symbol in uses.scalars:
        old = olds[symbol]
        captured = formula.captured(old)
        if "Tensor" in captured.annotation:
            dtype = _dtype(old, formula, captured)
            entry.tensors[symbol] = f"{{dims: [], dtype: {dtype}}}"
            entry.notes.append(f"tensor {symbol}: a tensor of one number, because nothing indexes it")
        else:
            is_float = formula.mask is None or symbol in floats
            entry.scalars[symbol] = _scalar(old, symbol, formula, captured, entry, is_float=is_float)
    texts = {key: _text(part) for key, part in parts.items()}
    # A mask that is always true and an unchanged score are left out: an entry without the key means the same.
    entry.mask = "" if texts.get("mask") == "True" else texts.get("mask", "")
    entry.score = "" if texts.get("score") == "score" else texts.get("score", "")
    return entry


class _Uses(ast.NodeVisitor):
    """The captured names in expressions, by use: indexed ones are tensors, with their indices; others are scalars."""

    def __init__(self, parts: Iterable[ast.expr]) -> None:
        self.tensors: dict[str, list[list[ast.expr]]] = {}
        self.scalars: dict[str, None] = {}
        for part in parts:
            self.visit(part)
        self.names = tuple(dict.fromkeys((*self.tensors, *self.scalars)))

    def visit_Call(self, node: ast.Call) -> None:
        for argument in node.args:
            self.visit(argument)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        assert isinstance(node.value, ast.Name)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        self.tensors.setdefault(node.value.id, []).append(items)
        for item in items:
            self.visit(item)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in LANGUAGE_NAMES:
            self.scalars[node.id] = None


class _Renamed(ast.NodeTransformer):
    def __init__(self, symbols: Mapping[str, str]) -> None:
        self.symbols = symbols

    def visit_Call(self, node: ast.Call) -> ast.Call:
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.symbols.get(node.id, node.id))


def _text(node: ast.expr) -> str:
    """The source of an expression. `ast.unparse` puts parentheses around the last operands of a long `and`."""
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        return word.join(f"({_text(v)})" if isinstance(v, ast.BoolOp | ast.IfExp) else _text(v) for v in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        operand = node.operand
        return f"not ({_text(operand)})" if isinstance(operand, ast.BoolOp | ast.Compare) else f"not {_text(operand)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return f"{node.func.id}({', '.join(map(_text, node.args))})"
    return ast.unparse(_BitsInComparisons().visit(_copy(node)))


class _BitsInComparisons(ast.NodeTransformer):
    """Puts `a & b` in `(a & b) == c` in parentheses, which the language asks for and `ast.unparse` leaves out."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        node.left, *node.comparators = map(_bits_in_parentheses, (node.left, *node.comparators))
        return node


def _bits_in_parentheses(node: ast.expr) -> ast.expr:
    """The node itself, or an operation on bits as the argument of a call without a name: its source is `(a & b)`."""
    is_of_bits = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
    return ast.Call(ast.Name(""), [node], []) if is_of_bits else node


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(ast.fix_missing_locations(node)), mode="eval").body


def _symbols(keys: Iterable[str], formula: Formula, macros: Collection[str], entry: Entry) -> dict[str, str]:
    """Key of a captured value -> its name as an argument of the op: legal, and no other argument's."""
    symbols: dict[str, str] = {}
    for key in keys:
        captured = formula.captured(key)
        symbol = captured.name.strip("_") or "value"
        problem = argument_problem(symbol, dict.fromkeys(macros))  # type: ignore[arg-type]  # only names are looked at
        if problem is not None:
            symbol = f"{symbol}_arg"
        if symbol in symbols.values():
            problem = f"'{symbol}' is another argument"
            plain, symbol = symbol, "_".join([*captured.owner.strip("_").split(".")[-1:], symbol]).strip("_")
            number = 2
            while symbol in symbols.values():
                symbol, number = f"{plain}_{number}", number + 1
        if problem is not None:
            entry.notes.append(f"'{captured.path}' is called {symbol} here: {problem.split(';')[0]}")
        symbols[key] = symbol
    return symbols


def _tensor(old: str, name: str, uses: list[list[ast.expr]], formula: Formula, entry: Entry) -> str:
    ranks = {len(items) for items in uses}
    if len(ranks) > 1:
        path = formula.captured(old).path
        raise DeclarationError(f"'{path}' is indexed with {' and '.join(map(str, sorted(ranks)))} indices")
    dims = [_dim(name, axis, [items[axis] for items in uses], ranks.copy().pop()) for axis in range(max(ranks))]
    captured = formula.captured(old)
    dtype = _dtype(old, formula, captured)
    indexing = f"{name}[{', '.join(ast.unparse(item) for item in uses[0])}]"
    made = "" if captured.made_by is None else f"; the file computes it as `{_short(captured.made_by)}`"
    entry.notes.append(f"tensor {name}: dims and dtype are guessed from {indexing}{made}")
    text = "" if captured.made_by is None else ast.unparse(captured.made_by)
    is_trained = dtype.startswith(("float", "bfloat")) and ("Parameter" in text or "requires_grad=True" in text)
    if dtype.startswith("float") and not is_trained and formula.score is not None:
        entry.notes.append(f"tensor {name}: add `grad: true` if it is trained")
    for items in uses:
        if any(_may_be_negative(item) for item in items):
            entry.notes.append(
                f"tensor {name}: an index below 0 counts from the end in torch; here it reads the first element"
            )
            break
    example = ""
    if dtype.startswith("int"):
        length = next((axis for axis, dim in enumerate(dims) if dim in ("q_idx", "kv_idx")), None)
        example = "" if length is None or len(dims) > 2 else f", example: i{length} // 300"
    grad = ", grad: true" if is_trained else ""
    return f"{{dims: [{', '.join(dims)}], dtype: {dtype}{grad}{example}}}"


def _dim(tensor: str, axis: int, items: list[ast.expr], rank: int) -> str:
    names = {item.id if isinstance(item, ast.Name) else "" for item in items}
    if names <= {"q_idx", "kv_idx"}:
        return "q_idx" if names == {"q_idx"} else "kv_idx"
    if len(names) == 1 and names <= set(INDEX_NAMES):
        return names.pop()
    size = f"{tensor}_size" + (f"_{axis}" if rank > 1 else "")
    return size if dim_problem(size) is None else f"size_of_{tensor}_{axis}"


def _dtype(name: str, formula: Formula, captured: Captured) -> str:
    text = "" if captured.made_by is None else ast.unparse(captured.made_by)
    written = re.search(r"dtype=(?:torch|jnp|np)\.(\w+)", text)
    kind = formula.guesses.get(name)
    if written and written[1] in _DTYPES and kind in (None, Kind.UNKNOWN):
        return _DTYPES[written[1]]
    if kind is None:
        made = [k for word, k in _MADE.items() if re.search(rf"\b{word}\(", text)]
        kind = made[0] if made else Kind.FLOAT if formula.score is not None else Kind.INT
    if kind is Kind.INT and written and written[1] in ("int64", "long"):
        return "int64"
    return _OF_KIND[kind]


def _among_floats(parts: Iterable[ast.expr]) -> set[str]:
    """The names that are divided, or combined or compared with a literal float. Nothing says that `x` of `0.5 * x` is a
    float, but a scalar that is one may also be given an integer."""
    found: set[str] = set()
    for node in (node for part in parts for node in ast.walk(part)):
        operands: list[ast.expr] = []
        match node:
            case ast.BinOp(left=left, right=right):
                operands = [left, right]
            case ast.Compare(left=left, comparators=others):
                operands = [left, *others]
            case ast.Call(args=args):
                operands = args
        is_division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        if is_division or any(isinstance(x, ast.Constant) and isinstance(x.value, float) for x in operands):
            found |= {name for operand in operands for name in _terms(operand)}
    return found


def _terms(node: ast.expr) -> Iterator[str]:
    """The names that a number is computed from by operators."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.BinOp(left=left, right=right):
            yield from (*_terms(left), *_terms(right))
        case ast.UnaryOp(operand=operand):
            yield from _terms(operand)


def _scalar(old: str, name: str, formula: Formula, captured: Captured, entry: Entry, *, is_float: bool) -> str:
    kind = formula.guesses.get(old)
    if kind is None:
        kind = Kind.FLOAT if is_float else Kind.INT
    if kind is Kind.BOOL:
        raise DeclarationError(
            f"'{captured.path}' is a flag of the caller, and a scalar is a number; write its value in the file"
        )
    word = "float" if kind is Kind.FLOAT else "int"
    if captured.annotation != word:
        entry.notes.append(f"scalar {name}: {word} is guessed from its use")
    return word if captured.example is None else f"{{type: {word}, example: {captured.example}}}"


def _may_be_negative(index: ast.expr) -> bool:
    """True for a difference of positions that nothing clamps."""
    if isinstance(index, ast.Call):
        return False
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) for n in ast.walk(index)) and not any(
        isinstance(n, ast.Call) for n in ast.walk(index)
    )


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------------------------- text


def yaml_lines(entry: Entry) -> Iterator[str]:
    """The lines of an entry, indented to stand under `variants:`."""
    for note in entry.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  # ", subsequent_indent="  #   ")
    yield f"  {_key(entry.name)}:"
    for key, text in (("doc", entry.doc), ("mask", entry.mask), ("score", entry.score)):
        if text:
            yield from _value(f"    {key}:", text)
    for key, table in (("tensors", entry.tensors), ("scalars", entry.scalars)):
        if table:
            yield f"    {key}:"
            for name, declaration in table.items():
                yield f"      {_key(name)}: {declaration}"


def _key(name: str) -> str:
    """A name as a key: in quotes if YAML takes it for a boolean or null, as `off` and `yes`."""
    return name if yaml.safe_load(name) == name else json.dumps(name)


def _value(key: str, text: str) -> Iterator[str]:
    if len(key) + len(text) + 1 > WIDTH:
        yield f"{key} >-"
        yield from textwrap.wrap(
            text,
            WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return
    try:
        is_plain = yaml.safe_load(f"key: {text}") == {"key": text}
    except yaml.YAMLError:
        is_plain = False
    yield f"{key} {text if is_plain else json.dumps(text)}"
