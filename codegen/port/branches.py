"""Branches that each call decides, in masks: one of two masks, in which a part that both have stands once."""

from __future__ import annotations

import ast

from codegen.port.arithmetic import logical
from codegen.port.values import Kind, Symbol


def either_of(condition: Symbol, first: Symbol, second: Symbol) -> Symbol:
    """The mask `first` if a condition holds, else the mask `second`.

    >>> texts = ("size > 0", "causal and near", "causal")
    >>> masks = [Symbol(ast.parse(text, mode="eval").body, Kind.BOOL) for text in texts]
    >>> ast.unparse(either_of(*masks).node)
    'causal and (not size > 0 or near)'
    """
    for is_and in (True, False):
        one, other = _parts(is_and, first), _parts(is_and, second)
        common = [key for key in one if key in other]
        if common:
            rest = (logical(is_and, [part for key, part in m.items() if key not in common]) for m in (one, other))
            return logical(is_and, [*(one[key] for key in common), either_of(condition, *rest)])
    negated = _negated(condition)
    if isinstance(first.node, ast.Constant):
        return logical(not first.node.value, [condition if first.node.value else negated, second])
    if isinstance(second.node, ast.Constant):
        return logical(not second.node.value, [negated if second.node.value else condition, first])
    return logical(False, [logical(True, [condition, first]), logical(True, [negated, second])])


def _parts(is_and: bool, mask: Symbol) -> dict[str, Symbol]:
    """Source of each part of `a and b`, or of `a or b` -> the part."""
    node = mask.node
    same = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) is is_and
    nodes = node.values if same and isinstance(node, ast.BoolOp) else [node]
    return {ast.dump(part): Symbol(part, Kind.BOOL) for part in nodes}


def _negated(condition: Symbol) -> Symbol:
    node = condition.node
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq) and len(node.ops) == 1:
        op = ast.NotEq() if isinstance(node.ops[0], ast.Eq) else ast.Eq()
        return Symbol(ast.Compare(node.left, [op], node.comparators), Kind.BOOL)
    return Symbol(ast.UnaryOp(ast.Not(), node), Kind.BOOL)
