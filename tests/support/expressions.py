"""Random expressions of the spec's language, and the names they read."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import strategies as st

from codegen.ir.evaluate import Array
from codegen.ir.expr import ScalarType, TensorSpec
from codegen.ir.parse import Scope

TENSORS = {
    "doc": TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32"),
    "place": TensorSpec(name="place", dims=("kv_idx",), dtype="int32"),
    "weight": TensorSpec(name="weight", dims=("h", "kv_idx")),
    "level": TensorSpec(name="level", dims=("h",)),
    "flag": TensorSpec(name="flag", dims=("kv_idx",), dtype="bool"),
}
SCOPE = Scope(tensors=TENSORS, scalars={"size": ScalarType.INT, "cap": ScalarType.FLOAT})


def contents(rng: np.random.Generator, batch: int, heads: int, keys: int) -> dict[str, Array]:
    """Random values for TENSORS."""
    return {
        "doc": rng.integers(-3, 4, (batch, keys)),
        "place": rng.integers(-3, 20, keys),
        "weight": rng.normal(size=(heads, keys)),
        "level": rng.normal(size=heads),
        "flag": rng.integers(0, 2, keys).astype(bool),
    }


LEAVES = {
    "int": [
        "q_idx",
        "kv_idx",
        "(q_idx - kv_idx)",
        "doc[b, <pos>]",
        "place[<pos>]",
        "h",
        "hkv",
        "size",
        "<length>",
        "<literal>",
    ],
    "float": ["weight[h, <pos>]", "level[h]", "cap", "(cap - level[h])", "0.5", "(-1.5)"],
    "mask": ["(<int> <order> <int>)", "(<float> <order> <float>)", "(<float> <order> <int>)", "flag[<pos>]"],
    "score": ["score", "<float>"],
    "pos": ["q_idx", "kv_idx"],
    "length": ["q_len", "kv_len"],
    "literal": ["0", "1", "2", "7", "16", "33", "(-1)", "(-3)", "(-20)"],
    "divisor": ["2", "3", "16", "17", "(-1)", "(-4)", "(abs(size) + 1)", "(-1 - abs(size))"],
    "order": ["<", "<=", ">", ">=", "==", "!="],
    "sum": ["+", "-"],
    "div": ["//", "%"],
    "extreme": ["min", "max"],
    "join": ["and", "or"],
    "bits": ["&", "|", "^"],
    "shift": ["<<", ">>"],
    "shifted": ["0", "1", "4", "(size & 3)", "(size - 2)"],
    "mask_bits": ["0", "1", "3", "15", "21", "63", "(-1)", "(-16)", "(-5)"],
    "rounding": ["floor", "ceil", "round"],
    "function": [
        *("exp", "exp2", "sqrt", "log", "log2", "log1p", "tanh", "sigmoid", "sin", "cos", "tan", "erf", "relu", "silu"),
        "<rounding>",
    ],
}
"""The forms of an innermost expression of each kind; `<kind>` stands for an expression of that kind."""

BRANCHES = {
    "int": [
        "(<int> <sum> <int>)",
        "(<literal> * <int>)",
        "(<int> * h)",
        "(<int> * size)",
        "(<int> * <pos>)",
        "(<int> <div> <divisor>)",
        "<extreme>(<int>, <int>)",
        "abs(<int>)",
        "(<int> <bits> <int>)",
        "(<int> <bits> <mask_bits>)",
        "(~<int>)",
        "(<int> <shift> <shifted>)",
        "(<int> if <mask> else <int>)",
        "doc[b, <int>]",
        "place[<int>]",
    ],
    "float": [
        "(<float> <sum> <float>)",
        "(<float> <sum> <int>)",
        "(<float> * <float>)",
        "<extreme>(<float>, <float>)",
        "<extreme>(<float>, <int>)",
        "abs(<float>)",
        "<rounding>(<float>)",
        "(<float> if <mask> else <int>)",
    ],
    "mask": [
        "(<mask> <join> <mask>)",
        "(not <mask>)",
        "where(<mask>, <mask>, <mask>)",
        "(<mask> == <mask>)",
        "(<mask> != <mask>)",
        "(<mask> ^ <mask>)",
    ],
    "score": [
        "(<score> <sum> <score>)",
        "(<score> * <float>)",
        "(<score> / (1 + abs(<score>)))",
        "(<score> ** 3)",
        "<function>(<score>)",
        "(<score> if <mask> else <int>)",
    ],
}
"""More forms, for expressions that are not innermost. Masks contain no function that libraries round differently."""


@st.composite
def texts(draw: st.DrawFn, kind: str, depth: int) -> str:
    """An expression of a kind, nested at most about `depth` deep."""
    form = draw(st.sampled_from(LEAVES[kind] + (BRANCHES.get(kind, []) if depth else [])))
    return re.sub(r"<(\w+)>", lambda part: draw(texts(part[1], max(depth - 1, 0))), form)
