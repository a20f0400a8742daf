# SPDX-License-Identifier: Apache-2.0
"""The conditions that the mask of a variant joins by `and`, as the manifest of a package writes the mask."""

import ast
from typing import Any

_SPELLINGS = {
    "q_idx >= kv_idx": "causal",
    "kv_idx <= q_idx": "causal",
    "q_idx - kv_idx < size": "window(size)",
}


def mask_parts(mask: str) -> frozenset[str]:
    """The conditions that a mask joins by `and`, each in one spelling."""
    if not mask:
        return frozenset()
    tree = ast.parse(f"({mask})", mode="eval").body
    joined = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    texts = [ast.unparse(part) for part in joined]
    return frozenset(_SPELLINGS.get(text, text) for text in texts)


def is_plain(variant: dict[str, Any], parts: frozenset[str], scalars: dict[str, str]) -> bool:
    """Whether a variant is softmax attention under a mask of these conditions, and nothing else."""
    own = any(variant[each] for each in ("score", "tensors", "sink", "decay"))
    return not own and variant["scalars"] == scalars and mask_parts(variant["mask"]) == parts
