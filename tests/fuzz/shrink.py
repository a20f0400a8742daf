"""A failure made small: ever smaller expressions and calls, as long as these still go wrong in the same way."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from .attention import Entry
from .calls import Call
from .running import Failure
from .session import run_one
from .specs import cleaned

SIMPLEST: dict[str, Any] = asdict(Call())


def shrunk(failure: Failure, device: str = "cpu", seconds: float = 120.0) -> Failure:
    """The smallest failure found in about so many seconds."""
    until = time.monotonic() + seconds
    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for entry, call in _smaller(failure):
            if time.monotonic() > until:
                break
            if (entry, call) == (failure.entry, failure.call):
                continue
            found = _attempt(entry, call, device)
            if found is not None and _alike(found, failure):
                failure, improved = found, True
                break
    return failure


def _attempt(entry: Entry, call: Call | None, device: str) -> Failure | None:
    try:
        return run_one(entry, call or Call(), device)
    except Exception:  # a call that is none: the evaluator cannot make it
        return None


def _alike(found: Failure, failure: Failure) -> bool:
    """An error stays that error, a mismatch a mismatch."""
    if found.kind != failure.kind or found.kind == "refused":
        return False
    return found.kind != "error" or found.label.split()[:2] == failure.label.split()[:2]


def _smaller(failure: Failure) -> Iterator[tuple[Entry, Call | None]]:
    """Candidates, those that take away most first."""
    for entry in _entries(failure.entry):
        yield entry, failure.call
    if failure.call is not None and failure.kind != "render":
        for call in _calls(failure.call):
            yield failure.entry, call


# -------------------------------------------------------------------------------------------------------------- entries


def _entries(entry: Entry) -> Iterator[Entry]:
    for key in ("sink", "decay", "dropout", "mask", "score"):
        if key in entry:
            yield cleaned({name: x for name, x in entry.items() if name != key})
    for key in ("mask", "score"):
        if key in entry:
            for text in _expressions(entry[key], boolean=key == "mask"):
                yield cleaned({**entry, key: text})
    for name, declared in entry.get("tensors", {}).items():
        for key in ("grad", "dtype"):
            if key in declared and not (key == "dtype" and not declared[key].startswith(("float", "bfloat"))):
                less = {other: x for other, x in declared.items() if other != key}
                yield {**entry, "tensors": {**entry["tensors"], name: less}}


def _expressions(text: str, *, boolean: bool) -> Iterator[str]:
    """The text with one node replaced by a child of its type, or by a constant."""
    tree = ast.parse(" ".join(text.split()), mode="eval").body
    size = len(list(ast.walk(tree)))
    made = {ast.unparse(tree)}
    for place in range(size):
        for other in _replaced(tree, place, boolean=boolean):
            found = ast.unparse(other)
            if found not in made and len(found) <= len(ast.unparse(tree)):
                made.add(found)
                yield found


def _replaced(tree: ast.expr, place: int, *, boolean: bool) -> Iterator[ast.expr]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    if place >= len(nodes):
        return
    target = nodes[place]
    parts = [node for node in ast.iter_child_nodes(target) if isinstance(node, ast.expr)]
    is_boolean = isinstance(target, ast.BoolOp | ast.Compare) or (boolean and target is tree)
    if isinstance(target, ast.Call | ast.Subscript):
        parts = parts[1:]
    options: list[ast.expr] = [part for part in parts if not isinstance(part, ast.Tuple)]
    if isinstance(target, ast.BoolOp) and len(target.values) > 2:
        options += [
            ast.BoolOp(target.op, target.values[:i] + target.values[i + 1 :]) for i in range(len(target.values))
        ]
    if is_boolean:
        options.append(ast.Constant(True))
    elif isinstance(target, ast.BinOp | ast.Call | ast.IfExp):
        options += [ast.Constant(0), ast.Constant(1), ast.Name("score")]
    elif isinstance(target, ast.Constant) and isinstance(target.value, int) and target.value > 16:
        options += [ast.Constant(16)]
    for option in options:
        yield option if target is tree else _swapped(tree, target, option)


def _swapped(tree: ast.expr, target: ast.expr, option: ast.expr) -> ast.expr:
    """A copy of the tree with `option` in place of `target`."""

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return option if node is target else self.generic_copy(node)

        def generic_copy(self, node: ast.AST) -> ast.AST:
            given: dict[str, Any] = {}
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    given[name] = [self.visit(x) if isinstance(x, ast.AST) else x for x in value]
                else:
                    given[name] = self.visit(value) if isinstance(value, ast.AST) else value
            return type(node)(**given)

    found = Swap().visit(tree)
    assert isinstance(found, ast.expr)
    return found


# ---------------------------------------------------------------------------------------------------------------- calls


def _calls(call: Call) -> Iterator[Call]:
    """Options as they are by default, then fewer heads, sequences, rows and keys."""
    for name, value in asdict(call).items():
        plain = SIMPLEST[name]
        kept = ("mode", "family", "batch", "heads", "kv_heads", "q_lens", "kv_lens", "tiles", "dim", "dim_v", "scalars")
        if value != plain and name not in (*kept, "contents", "seed", "deterministic", "dtype"):
            yield replace(call, **{name: plain})
    if call.passes == "all":
        yield replace(call, passes="fwd")
    if call.mode != "dense":
        yield _dense(call)
    if call.heads > call.kv_heads or call.heads > 1:
        yield replace(call, heads=1, kv_heads=1)
    if call.family == "portable":
        yield replace(call, dtype="float32")
        if (call.dim, call.dim_v) != (16, 16):
            yield replace(call, dim=16, dim_v=16)
    yield from _shorter(call)


def _dense(call: Call) -> Call:
    plain = {name: SIMPLEST[name] for name in _BY_TOKEN}
    return replace(
        call,
        mode="dense",
        q_lens=call.q_lens[:1],
        kv_lens=call.kv_lens[:1],
        batch=1,
        q_offset=call.q_offset if isinstance(call.q_offset, int | str) else 0,
        **plain,
    )


_BY_TOKEN = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths", "padding_id")


def _shorter(call: Call) -> Iterator[Call]:
    count = len(call.q_lens)
    if call.packed and count > 1:
        for gone in range(count):
            kept = [i for i in range(count) if i != gone]
            offset = call.q_offset
            yield replace(
                call,
                q_lens=tuple(call.q_lens[i] for i in kept),
                kv_lens=tuple(call.kv_lens[i] for i in kept),
                q_offset=tuple(offset[i] for i in kept) if isinstance(offset, tuple) else offset,
            )
    if not call.packed and call.batch > 1:
        first: dict[str, Any] = {name: x[:1] for name in _BY_TOKEN[:-1] if (x := getattr(call, name)) is not None}
        offset = call.q_offset[:1] if isinstance(call.q_offset, tuple) else call.q_offset
        yield replace(call, batch=1, q_offset=offset, **first)
    for side, rest in (("q_lens", ("q_segment_ids", "q_positions")), ("kv_lens", ("kv_segment_ids", "kv_positions"))):
        lens = getattr(call, side)
        shared = call.q_segment_ids is not None and call.kv_segment_ids is None
        shared |= call.q_positions is not None and call.kv_positions is None
        for place, length in enumerate(lens):
            for shorter in {length // 2, length - 16, length - 1} - {length}:
                if shorter < 1 or (shared and not call.packed):
                    continue
                cut: dict[str, Any] = {
                    name: tuple(x[:shorter] for x in y) for name in rest if (y := getattr(call, name)) is not None
                }
                cut[side] = (*lens[:place], shorter, *lens[place + 1 :])
                yield replace(call, **cut)
