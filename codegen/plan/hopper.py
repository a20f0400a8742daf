"""What the templates of Hopper's kernels, written in Gluon, need beside the plans of the portable ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codegen.plan.hopper_kernels import sums_by_keys
from codegen.plan.hopper_text import BlockText
from codegen.plan.kernel import ArgGroup
from codegen.plan.variant import VariantPlan
from codegen.util.text import words

FORWARD = "hopper_fwd"
"""File stem of the forward, and its name among the hashes of kernels."""

BACKWARD, WIDE_BACKWARD, DELTA = "hopper_bwd", "hopper_bwd_wide", "hopper_delta"
"""The same of the backward, of that for more than 128 columns, and of what runs before and after it."""


def fuses_backward(planned: VariantPlan) -> bool:
    """Whether one kernel can compute dq, dk and dv, with all that the variant gathers besides."""
    return sums_by_keys(planned.terms)


def gluon(text: str, keys: str = "gl.arange(0, BLOCK_N, layout=KEY)") -> str:
    """Triton source as Gluon: the same operations, and `keys` for the vector of a block's keys.

    >>> gluon("kv_idx = start_n + tl.arange(0, BLOCK_N)")
    'kv_idx = start_n + gl.arange(0, BLOCK_N, layout=KEY)'
    """
    text = text.replace("tl.arange(0, BLOCK_N)", keys)
    text = text.replace("@triton.jit", "@gluon.jit").replace("tl.sigmoid(", "sigmoid(")
    return re.sub(r"\btl\.", "gl.", text)


def names(groups: Sequence[ArgGroup], pattern: str = r"\w+") -> list[str]:
    """The names of arguments that match a pattern."""
    return [name for group in groups for name in group.names if re.fullmatch(pattern, name)]


def used(candidates: Iterable[str], text: str) -> list[str]:
    """Those of some names that occur in a piece of source."""
    found = words(text)
    return [name for name in candidates if name in found]


def needed(lines: Sequence[str], text: str) -> list[str]:
    """Those of some statements, in order, without which a piece of source has names that nothing defines.

    >>> needed(["a = 1", "b = 2", "c = a + 1"], "f(c)")
    ['a = 1', 'c = a + 1']
    """
    wanted, found = set(words(text)), []
    for line in reversed(lines):
        targets, _, value = line.partition(" = ")
        if wanted & words(targets):
            wanted |= words(value)
            found.append(line)
    return found[::-1]


def by_vectors(lines: Sequence[str]) -> list[str]:
    """Those of a block's statements that find vectors, of keys or of rows: they need neither the product nor a tile.

    >>> by_vectors(["x_kv = f(kv_idx)", "y_qk = x_kv[None, :] + z_q[:, None]", "w_qk = y_qk * y_qk"])
    ['x_kv = f(kv_idx)']
    """
    later, found = {"qk"}, []
    for line in lines:
        defined, _, value = line.partition(" = ")
        if {"None", *later} & words(value):
            later |= words(defined)
        else:
            found.append(line)
    return found


_OWN = {
    "kv_idx": "own_key",
    "cols": "own_col",
    "rows": "own_row",
    "q_row": "own_q_row",
    "q_idx": "own_position",
    "kv_segment_ids_kv": "own_segment",
    "q_segment_ids_q": "own_segment",
}
"""Vectors of a block, and what they are called where each thread has an element of its own."""

_GIVEN = re.compile(r"(q|kv)_(idx|segment_ids_(?:q|kv)) = tl\.load\(.*\)( if POSITIONS else .*)?")
"""The positions and ids of tokens that a segmented call gives."""


def read_apart(lines: Sequence[str], names: Mapping[str, str] | None = None) -> list[str]:
    """A block's statements of keys or of rows, where they read memory: each thread then reads for one of its own alone,
    and the others' are what others read. `names`: further vectors, and what these are called there.

    >>> read_apart(["kv_idx = start_n + tl.arange(0, BLOCK_N)", "x_kv = tl.load(x_ptr + kv_idx)"])
    ['own_key = start_n + tl.arange(0, BLOCK_N)', 'x_kv = tl.load(x_ptr + own_key)']
    """
    if not any("tl.load(" in line for line in lines):
        return []
    own = {**_OWN, **(names or {})}
    vectors = "|".join(rf"\b{name}\b" for name in own)
    return [re.sub(vectors, lambda found: own[found[0]], line) for line in lines]


def exchanged(lines: Sequence[str]) -> list[str]:
    """A block's statements, where positions and ids that a call gives are those that `read_apart` has read.

    They are had where they are used, for all of them at a time would be more than there are registers.

    >>> exchanged(["q_idx = tl.load(x_ptr + rows) if POSITIONS else rows + q_shift", "y = q_idx + 1"])
    ['q_idx = tl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift', 'y = q_idx + 1']
    """

    def exchange(found: re.Match[str]) -> str:
        axis, what, otherwise = found.groups()
        name, layout = f"{axis}_{what}", "ROW" if axis == "q" else "KEY"
        return f"{name} = tl.convert_layout({_OWN[name]}, {layout}){otherwise or ''}"

    return [_GIVEN.sub(exchange, line) for line in lines]


def given(lines: Sequence[str]) -> list[str]:
    """Those of some statements that read positions or ids that a call gives.

    >>> given(["rows = f(x)", "q_idx = tl.load(x_ptr + rows) if POSITIONS else rows + q_shift"])
    ['q_idx = tl.load(x_ptr + rows) if POSITIONS else rows + q_shift']
    """
    return [line for line in lines if _GIVEN.fullmatch(line)]


def targets(lines: Sequence[str]) -> list[str]:
    """The names that some statements define.

    >>> targets(["x, y = f(a)", "z = x"])
    ['x', 'y', 'z']
    """
    return [name for line in lines for name in line.partition(" = ")[0].split(", ")]


def without(lines: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of some statements that define none of some names.

    >>> without(["x = f(a)", "y = x"], ["x"])
    ['y = x']
    """
    return [line for line in lines if not set(targets([line])) & set(names)]


def by_distance(text: str) -> str:
    """Source in which `apart` stands for how far a row and a key are apart.

    It is found of positions in the block, of which pairs on a diagonal share theirs, and one number of the block: of
    `q_idx - kv_idx` the compiler does not see that they are the same, and loads for each pair.

    >>> by_distance("x_qk = tl.load(x_ptr + clamp_index(q_idx[:, None] - kv_idx[None, :], x_size_1))")
    'x_qk = tl.load(x_ptr + clamp_index(apart, x_size_1))'
    """
    return text.replace("q_idx[:, None] - kv_idx[None, :]", "apart")


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """When a block of a backward evaluates the statements of its scores and of its gradients.

    `apart`: ahead of the products, what it reads for its rows, an element a thread; of these `exchanged` are the names
    whose values threads exchange behind the products. `shared`: behind the products, what scores and gradients share,
    where a gradient reads the product. `first`, then `of_segments`: in the branch of the scores, the latter behind the
    rest of the mask. `again`: what gradients read, a second time behind the exponentials, where nothing is shared.
    """

    apart: Sequence[str]
    exchanged: Sequence[str]
    shared: Sequence[str]
    first: Sequence[str]
    of_segments: Sequence[str]
    again: Sequence[str]


def row_order(block: BlockText) -> RowOrder:
    """The order of a block's statements. Every name is defined, in its own layout, ahead of what reads it."""
    lines = block.statements
    gradients = " ".join([*(part.text for part in block.gradients), block.dscore])
    again = needed(lines, gradients)
    shared = again if "qk" in words(" ".join(again)) else []
    vectors = by_vectors(lines)
    apart, exchanged_names = _read_ahead(vectors, [line for line in again if line not in given(lines)])
    own = [line for line in lines if line not in shared]
    if exchanged_names:
        tiles = [line for line in own if line not in vectors]
        own = needed(without(own, exchanged_names), " ".join([*tiles, block.logit, block.keep, block.same]))
    first = own
    if block.same:
        others = [line for line in own if line not in given(own)]
        first = needed(own, " ".join([*others, block.logit, block.keep]))
    return RowOrder(
        apart=apart,
        exchanged=exchanged_names,
        shared=shared,
        first=first,
        of_segments=[line for line in own if line not in first],
        again=[] if shared else again,
    )


def _read_ahead(vectors: Sequence[str], again: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of a block's vectors that threads read an element of each, or find of such, and which names that defines.

    Not what gradients read `again`, nor what needs elements that these read. Definitions that both need are made for
    both: here under a name of its own, for a name has one layout.
    """
    later = set(targets([line for line in again if "tl.load(" in line]))
    found = []
    for line in vectors:
        if later & words(line):
            later |= set(targets([line]))
        elif line not in again:
            found.append(line)
    both = [line for line in needed(vectors, " ".join(found)) if line in again]
    names = {name: f"ahead_{name}" for name in targets(both) if name not in _OWN}
    lines = read_apart([line for line in vectors if line in found or line in both], names)
    exchanged_names = [name for name in targets(lines) if name not in {*_OWN.values(), *names.values()}]
    # A row's place is for what is read there.
    return needed(lines, " ".join(n for n in targets(lines) if n != "own_q_row")), exchanged_names


FILTERS = {
    "row_order": row_order,
    "by_distance": by_distance,
    "gluon": gluon,
    "names": names,
    "used": used,
    "needed": needed,
    "by_vectors": by_vectors,
    "read_apart": read_apart,
    "exchanged": exchanged,
    "given": given,
    "targets": targets,
    "without": without,
}
"""Filters of the templates under `hopper/`."""
