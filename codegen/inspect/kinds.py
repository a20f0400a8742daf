"""The kinds of attention that a variant belongs to; the gallery can be filtered by kind."""

from __future__ import annotations

from codegen.analysis.distances import adds_to_score
from codegen.analysis.schedule import Schedule
from codegen.ir import expr
from codegen.ir.expr import INDEX_NAMES, Load
from codegen.spec.model import Variant

KINDS = {
    "mask": "some queries do not attend to all keys",
    "score": "the score is transformed",
    "bias": "something is added to the score",
    "trained": "has gradients of its own",
    "decay": "has a log-decay",
    "sink": "has a logit in the denominator alone",
    "dropout": "drops probabilities",
    "packed": "tells the documents of a packed row apart",
    "per head": "differs between heads",
}
"""Kind -> its meaning."""

SCHEDULES = {
    Schedule.DENSE: "no mask: every block is visited",
    Schedule.CLOSED_FORM: "bounds of the visited blocks are computed from the block's index",
    Schedule.RANGES: "a small kernel writes one range of visited blocks for each block",
    Schedule.LISTS: "a small kernel writes lists of partial and of full blocks",
}
"""Schedule -> how a kernel finds the blocks that it visits, in words."""


def kinds(variant: Variant) -> list[str]:
    """The kinds of a variant, in the order of `KINDS`."""
    score = variant.score
    trained = any(tensor.grad for tensor in variant.tensors.values())
    exprs = [e for e in (variant.mask, score) if e is not None]
    found = {
        "mask": variant.mask is not None,
        "score": score is not None and not _is_bias(variant),
        "bias": score is not None and _is_bias(variant),
        "trained": trained or variant.sink or variant.decay,
        "decay": variant.decay,
        "sink": variant.sink,
        "dropout": variant.dropout,
        "packed": _compares_documents(variant),
        "per head": bool({"h", "hkv"} & expr.names(*exprs)) or variant.sink or variant.decay,
    }
    return [kind for kind in KINDS if found[kind]]


def _is_bias(variant: Variant) -> bool:
    """True if the score is the old score and something that does not depend on it."""
    return variant.score is not None and adds_to_score(variant.score)


def _compares_documents(variant: Variant) -> bool:
    """True if the mask compares the numbers that one tensor gives to the query's and to the key's position."""
    if variant.mask is None:
        return False
    for node in expr.walk(variant.mask):
        if isinstance(node, expr.Op) and node.op == "eq" and all(isinstance(a, Load) for a in node.args):
            read = [a for a in node.args if isinstance(a, Load)]
            positions = {str(a.indices[-1].names) for a in read if a.indices}
            if read[0].tensor == read[1].tensor and len(positions) == 2:
                return INDEX_NAMES[3] in expr.names(node)
    return False
