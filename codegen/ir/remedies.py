"""What to write for words that the language lacks: other libraries' spellings, and operations on more than one pair.

Each remedy is the tail of an error message, after a semicolon.
"""

from __future__ import annotations

import ast

from codegen.ir.language import FUNCTIONS, INFINITY

MASK_ON_SCORE = "; to leave out low scores write score: where(score > 0.1, score, -1e30)"

_ONE_PAIR = (
    "; an expression sees one query and one key: a '{}' that does not depend on scores may be computed before the call "
    "and read from a tensor"
)
_VECTORS = "; an expression has no vectors: 'score' is the scaled product of query and key"
_RANDOM = "; for dropout write 'dropout: true', for a random pattern read a tensor"

_OVER_KEYS = [
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cumprod",
    "cumsum",
    "entmax",
    "logcumsumexp",
    "logsumexp",
    "mean",
    "norm",
    "prod",
    "sort",
    "sparsemax",
    "std",
    "sum",
    "topk",
    "var",
]
_OF_VECTORS = ["bmm", "dot", "einsum", "inner", "matmul", "mm", "outer", "vdot"]
_AT_RANDOM = ["bernoulli", "dropout", "rand", "randint", "randn", "random", "uniform"]

_SPELLINGS = {
    "bool": "a comparison",
    "isin": "x in tensor[b]",
    "leaky_relu": "max(x, 0.01 * x)",
    "log10": "log(x) / log(10)",
    "logical_and": "and",
    "logical_not": "not",
    "logical_or": "or",
    "maximum": "max(x, y)",
    "minimum": "min(x, y)",
    "mod": "%",
    "pow": "**",
    "remainder": "%",
    "rsqrt": "1 / sqrt(x)",
    "softplus": "log1p(exp(x))",
    "square": "x ** 2",
}
"""Function of other libraries -> what the language has in its place."""

_FUNCTIONS = {
    **{name: _ONE_PAIR.format(name) for name in _OVER_KEYS},
    **dict.fromkeys(_OF_VECTORS, _VECTORS),
    **dict.fromkeys(_AT_RANDOM, _RANDOM),
    **{name: f"; write {spelling}" for name, spelling in _SPELLINGS.items()},
    "float": f"; write {INFINITY} for infinity; an integer beside a float is converted",
    "softmax": "; the op takes the softmax of the scores itself",
}

_INPUTS = dict.fromkeys(
    ["q", "k", "v", "query", "key", "value"], "; an expression reads no vectors: 'score' is their product"
)
_NAMES = {
    **dict.fromkeys(("i", "m", "row", "q"), "q_idx"),
    **dict.fromkeys(("j", "n", "col", "k"), "kv_idx"),
    **dict.fromkeys(("batch", "batch_idx"), "b"),
    **dict.fromkeys(("head", "head_idx"), "h"),
    "kv_head": "hkv",
}
"""Usual name of an index -> its name here."""


def for_function(name: str) -> str:
    """What to write for a function of other libraries, empty for an unknown word.

    >>> for_function("rsqrt")
    '; write 1 / sqrt(x)'
    """
    return _FUNCTIONS.get(name, "")


def for_name(name: str) -> str:
    """What to write for the usual name of an index; the spec may also have meant a declaration.

    >>> for_name("head")
    "; write h, or declare 'head' under tensors: or scalars:"
    """
    if name in _NAMES:
        return f"; write {_NAMES[name]}, or declare '{name}' under tensors: or scalars:"
    return _INPUTS.get(name, "")


def for_indexed(name: str) -> str:
    """What to read for an indexed input of the op, empty for other names."""
    if name == "score":
        return "; 'score' is the score of this query and key alone"
    return _INPUTS.get(name, "")


def for_syntax(node: ast.expr) -> str:
    """What to write for a part of Python that the language lacks, empty if nothing is near.

    >>> for_syntax(ast.parse("torch.tanh(score)", mode="eval").body)
    '; write tanh(...)'
    """
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            return f"; write {name}(...)" if name in FUNCTIONS or name == "where" else for_function(name)
        case ast.Call(keywords=[_, *_]):
            return "; give all arguments by position"
        case ast.Attribute(attr=name) if name == INFINITY:
            return f"; write {INFINITY}"
        case ast.Lambda():
            return "; write its body alone"
        case ast.NamedExpr():
            return "; name a part under masks: or scores:"
        case ast.Slice():
            return "; an index is one integer"
    return ""
