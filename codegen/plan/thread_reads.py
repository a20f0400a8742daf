"""What a warpgroup of Hopper's kernels reads ahead of its products: one element a thread, exchanged behind them.

A vector in the layout of a product is held by several threads at a time, each of which would load it. Instead each
thread loads one element, under a name of its own (`own_key`), and the vector is a `convert_layout` of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.plan.code import Broadcast, Choice, Code, Infix, Name, builtin, rebuilt
from codegen.plan.kernel import Block
from codegen.plan.statements import Assign, defines, needed, of_tokens, renamed, tiles, uses, vectors, without

OWN = {
    "kv_idx": "own_key",
    "cols": "own_col",
    "rows": "own_row",
    "q_row": "own_q_row",
    "q_idx": "own_position",
    "kv_segment_ids_kv": "own_segment",
    "q_segment_ids_q": "own_segment",
}
"""Vector of a block -> what it is called where each thread has one element."""


def thread_reads(statements: Sequence[Assign], names: Mapping[str, str] | None = None) -> list[Assign]:
    """The statements by which each thread reads one element, if there is anything to read; else none.

    `names`: further vectors, and what they are called there.
    """
    if not any(statement.reads_memory for statement in statements):
        return []
    own = {**OWN, **(names or {})}
    return [renamed(statement, own) for statement in statements]


def exchanged(statement: Assign) -> Assign:
    """The statement, where it reads positions or segment ids that a call gives, with the elements that threads have
    read. They are exchanged where they are used: all of them at a time would be more than there are registers."""
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

    `apart` is computed from positions in the block, of which pairs on a diagonal share theirs, and one number of the
    block: of `q_idx - kv_idx` the compiler does not see that they are equal, and loads for each pair.
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

    `reads`: ahead of the products, what it reads for its rows, an element a thread; of these `exchanged` are the names
    whose values threads exchange behind the products. `shared`: behind the products, what scores and gradients share,
    where a gradient reads the product. `score`, then `segments`: in the branch of the scores, the latter behind the
    rest of the mask. `gradients`: what gradients read, computed again behind the exponentials, where nothing is shared.
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
    """The vectors of a block of which each thread reads an element, or computes it from such, and the names that this
    defines.

    Not what gradients read `again`, nor what needs elements that these read. Definitions that both need are made for
    both: here under a name of its own, for a name has one layout.
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
    # A row's place is for what is read there.
    return needed(reads, frozenset(defines(reads)) - {"own_q_row"}), exchanged_names
