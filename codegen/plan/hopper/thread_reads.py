"""Reads of a warpgroup of Hopper's kernels before its products: one element per thread, exchanged after them.

In the layout of a product, several threads hold each element of a vector, and each of them would load it. Instead each
thread loads one element, under another name (`own_key`), and `convert_layout` makes the vector from these elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.plan.code.statements import Assign, defines, needed, of_tokens, renamed, tiles, uses, vectors, without
from codegen.plan.code.tree import Broadcast, Choice, Code, Infix, Name, builtin, rebuilt
from codegen.plan.kernels.kernel import Block

OWN = {
    "kv_idx": "own_key",
    "cols": "own_col",
    "rows": "own_row",
    "q_row": "own_q_row",
    "q_idx": "own_position",
    "kv_segment_ids_kv": "own_segment",
    "q_segment_ids_q": "own_segment",
}
"""Vector of a block -> its name when each thread has one element."""


def thread_reads(statements: Sequence[Assign], names: Mapping[str, str] | None = None) -> list[Assign]:
    """The statements by which each thread reads one element, if there is anything to read; else none.

    `names`: further vectors -> their names when each thread has one element.
    """
    if not any(statement.reads_memory for statement in statements):
        return []
    own = {**OWN, **(names or {})}
    return [renamed(statement, own) for statement in statements]


def exchanged(statement: Assign) -> Assign:
    """The statement. If it reads positions or segment ids that a call gives, it exchanges the elements that threads
    have read instead. Each vector is exchanged where it is used, because all of them at once would not fit the
    registers."""
    if not statement.of_tokens:
        return statement
    layout = Name("ROW" if statement.target.startswith("q_") else "KEY")
    vector = builtin("convert_layout", Name(OWN[statement.target]), layout)
    value = statement.value
    return replace(statement, values=(replace(value, value=vector) if isinstance(value, Choice) else vector,))


_POSITIONS = [(Broadcast(Name("q_idx"), axis), Broadcast(Name("kv_idx"), 1 - axis)) for axis in (0, 1)]
"""The positions of a pair as a tile's code has them: of rows by keys, and of keys by rows."""


def by_distance(code: Code) -> Code:
    """The code with `apart` in place of `q_idx - kv_idx`.

    `apart` is computed from the difference of two places in the block, which pairs on a diagonal share, and one number
    of the block. Of `q_idx - kv_idx` the compiler does not see that it is equal along a diagonal, and loads for each
    pair.
    """

    def replaced(node: Code) -> Code | None:
        if not isinstance(node, Infix) or node.symbol != "-":
            return None
        for row, key in _POSITIONS:
            if node.right == key and node.left == row:
                return Name("apart")
            if node.right == key and isinstance(node.left, Infix) and (node.left.symbol, node.left.right) == ("+", row):
                return Infix("+", by_distance(node.left.left), Name("apart"))
        return None

    return rebuilt(code, replaced)


@dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """When a block of a backward evaluates the statements of its scores and of its gradients.

    `reads` run before the products and read vectors of the block's rows, one element per thread. `exchanged` names the
    vectors among them whose elements threads exchange after the products. `shared` run after the products: statements
    that scores and gradients share, if a gradient reads the product. `score`, then `segments`, run in the branch of the
    scores, the latter after the rest of the mask. `gradients` are the statements that gradients need, run again after
    the exponentials, if nothing is shared.
    """

    reads: Sequence[Assign]
    exchanged: Sequence[str]
    shared: Sequence[Assign]
    score: Sequence[Assign]
    segments: Sequence[Assign]
    gradients: Sequence[Assign]


def block_order(block: Block) -> BlockOrder:
    """The order of a block's statements. Every name is defined, in its own layout, ahead of what reads it."""
    statements = list(block.statements)
    again = needed(statements, uses([part.value for part in block.gradients], block.dscore))
    shared = again if "qk" in uses(again) else []
    of_vectors = vectors(statements)
    reads, exchanged_names = _read_ahead(of_vectors, _but(again, of_tokens(again)))
    own = _but(statements, shared)
    if exchanged_names:
        in_tiles = tiles(own)
        own = needed(without(own, exchanged_names), uses(in_tiles, block.logit, block.keep, block.same))
    score = own
    if block.same is not None:
        score = needed(own, uses(_but(own, of_tokens(own)), block.logit, block.keep))
    return BlockOrder(
        reads=reads,
        exchanged=exchanged_names,
        shared=shared,
        score=score,
        segments=_but(own, score),
        gradients=[] if shared else again,
    )


def _but(statements: Iterable[Assign], others: Sequence[Assign]) -> list[Assign]:
    return [statement for statement in statements if statement not in others]


def _read_ahead(of_vectors: Sequence[Assign], again: Sequence[Assign]) -> tuple[list[Assign], list[str]]:
    """The statements by which each thread reads one element of a block's vectors, or computes one from elements that it
    read, and the names of the vectors to exchange.

    Statements that gradients run `again` are left out, and so are statements that need elements which those load.
    Definitions that both need are made twice: here under another name, because a name has one layout.
    """
    later = set(defines(statement for statement in again if statement.reads_memory))
    found = []
    for statement in of_vectors:
        if later & (statement.uses | statement.defines):
            later |= statement.defines
        elif statement not in again:
            found.append(statement)
    both = [statement for statement in needed(of_vectors, uses(found)) if statement in again]
    names = {name: f"ahead_{name}" for name in defines(both) if name not in OWN}
    reads = thread_reads([s for s in of_vectors if s in found or s in both], names)
    exchanged_names = [name for name in defines(reads) if name not in {*OWN.values(), *names.values()}]
    # The place of a row is computed only if a read needs it.
    return needed(reads, frozenset(defines(reads)) - {"own_q_row"}), exchanged_names
