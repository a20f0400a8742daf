"""The meaning of each word of the expression language, as the reference and tools show it. Nothing computes with it.

`tests/unit/ir/test_descriptions.py` compares the names with those that the parser reads.
"""

from __future__ import annotations

from codegen.ir.language import INFINITY, MOST_MEMBERS
from codegen.ir.parse import MOST_NODES

NAMES = {
    "b": "Batch row; of a packed call the sequence.",
    "h": "Query head.",
    "hkv": "Key head of the query head: `h // (Hq / Hkv)`.",
    "q_idx": "Position of the query: its row plus `q_offset`, or what the call gives as `q_positions`.",
    "kv_idx": "Position of the key: its row, or what the call gives as `kv_positions`.",
    "q_len": "Query rows of the call, or of the packed sequence.",
    "kv_len": "Keys of the call, of the packed sequence, or of the batch row if the call gives `kv_lengths`. A segment "
    "has no length of its own.",
    "score": "The scaled dot product `scale * q @ k^T`, natural log. Scores read it, masks do not.",
    INFINITY: "Infinity. `where(condition, score, -inf)` leaves a pair out as a mask does; the condition cannot read "
    "`score`. A score may be no other infinity.",
    "True": "The boolean.",
    "False": "The boolean.",
}
"""Names that every expression may read, besides those that its spec declares."""

FUNCTIONS = {
    "abs": ("abs(x)", "Absolute value. Of an integer it is an integer. The derivative at 0 is 0."),
    "min": ("min(x, y, ...)", "The least of 2 to 8 numbers. Equal arguments share the derivative, half each."),
    "max": ("max(x, y, ...)", "The greatest of 2 to 8 numbers. Equal arguments share the derivative, half each."),
    "clamp": ("clamp(x, low, high)", "`x` limited to `low` to `high`. At both ends the derivative is that of `x`."),
    "relu": ("relu(x)", "`max(x, 0)`. The derivative at 0 is 0."),
    "silu": ("silu(x)", "`x * sigmoid(x)`."),
    "gelu": ("gelu(x)", "`x` times the normal distribution's cumulative probability, exact (`erf`)."),
    "int": ("int(x)", "The integer part, toward zero: an integer. Its derivative is 0."),
    "exp": ("exp(x)", "e to the power `x`."),
    "exp2": ("exp2(x)", "2 to the power `x`."),
    "log": ("log(x)", "Natural logarithm."),
    "log2": ("log2(x)", "Logarithm of base 2."),
    "log1p": ("log1p(x)", "`log(1 + x)`, exact near 0."),
    "sqrt": ("sqrt(x)", "Square root."),
    "tanh": (
        "tanh(x)",
        "Hyperbolic tangent. With 16-bit inputs on NVIDIA chips it is one instruction of relative error 2**-11.",
    ),
    "sigmoid": ("sigmoid(x)", "`1 / (1 + exp(-x))`."),
    "sin": ("sin(x)", "Sine."),
    "cos": ("cos(x)", "Cosine."),
    "tan": ("tan(x)", "Tangent."),
    "erf": ("erf(x)", "Error function."),
    "floor": ("floor(x)", "The greatest whole number up to `x`, as a float. Its derivative is 0."),
    "ceil": ("ceil(x)", "The least whole number from `x` on, as a float. Its derivative is 0."),
    "round": ("round(x)", "The nearest whole number, as a float; a half goes to the even one. Its derivative is 0."),
    "where": ("where(condition, x, y)", "`x` if the condition holds, else `y`. Also written `x if condition else y`."),
}
"""Function -> how it is called, and its result."""

OPERATORS = {
    "+": ("numbers", "Sum. An integer beside a float is converted, exactly up to 2**24."),
    "-": ("numbers", "Difference; with one operand the negative."),
    "*": ("numbers", "Product."),
    "/": (
        "numbers",
        "Quotient, always a float. `int`, `floor`, `ceil` and comparisons of an integer divided by a whole literal are "
        "exact.",
    ),
    "//": ("integers", "Quotient, rounded down."),
    "%": ("integers", "Remainder, with the sign of the divisor."),
    "**": ("numbers", "Power. The exponent is a literal from -32 to 32."),
    "&": ("booleans, or integers", "And; of integers bit by bit, in two's complement."),
    "|": ("booleans, or integers", "Or; of integers bit by bit."),
    "^": ("booleans, or integers", "Exclusive or; of integers bit by bit."),
    "~": ("a boolean, or an integer", "Not; of an integer all its bits."),
    "<<": ("integers", "Shift to the left by 0 to 30 bits."),
    ">>": ("integers", "Shift to the right by 0 to 30 bits, with the sign kept."),
    "<": ("numbers", "Less. Comparisons chain: `0 <= q_idx - kv_idx < size`."),
    "<=": ("numbers", "At most."),
    ">": ("numbers", "Greater."),
    ">=": ("numbers", "At least."),
    "==": ("numbers, or booleans", "Equal."),
    "!=": ("numbers, or booleans", "Not equal."),
    "in": (
        "an integer and a list",
        f"Whether the list holds the integer. A list is `(1, 2, 3)`, or the last dim of an integer tensor, a literal "
        f"of at most {MOST_MEMBERS}: `x in chosen[b, hkv, q_idx // 64]`. Blocks that no list names are skipped.",
    ),
    "not in": ("an integer and a list", "The contrary of `in`."),
    "and": ("booleans", "Both hold."),
    "or": ("booleans", "At least one holds."),
    "not": ("a boolean", "It does not hold."),
}
"""Operator -> the kinds of its operands, and its result."""

PRECEDENCE = (
    ("**",),
    ("- (of one operand)", "~"),
    ("*", "/", "//", "%"),
    ("+", "-"),
    ("<<", ">>"),
    ("&",),
    ("^",),
    ("|",),
    ("<", "<=", ">", ">=", "==", "!=", "in", "not in"),
    ("not",),
    ("and",),
    ("or",),
    ("x if condition else y",),
)
"""Operators from the tightest to the loosest, as in Python. `&`, `|` and `^` bind tighter than comparisons."""

LIMITS = {
    "integers": "32 bits. A literal outside them is an error. A sum, product or shift that leaves them in a call has "
    "no defined value: kernels, skipped blocks and the reference on the CPU may each take another. Nor has `//` or "
    "`%` by zero.",
    "floats": "float32. A literal that is no finite float32 is an error.",
    "size": f"At most {MOST_NODES} operations and operands, with named masks and scores written out. A sum nests "
    "once for each term: some hundred terms may be refused as nested too deeply.",
    "lists": f"At most {MOST_MEMBERS} elements in the dim of a tensor on the right of `in`.",
    "constants": "Literals are computed when the spec is read: a division by zero or a `log(0)` is an error there. So "
    "is a mask that provably keeps no pair.",
}
"""The limits of an expression."""
