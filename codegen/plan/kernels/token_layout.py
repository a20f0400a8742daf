"""How the tokens of a call lie in memory: one object per mode, with what differs in kernels and launches."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.analysis.call_modes import Mode
from codegen.plan.code.host import HostCode, host, listed
from codegen.plan.code.tree import Code, Infix, Literal, Name, builtin, product, total


class TokenLayout:
    """A dense call: tensors `[B, H, S, D]`, one sequence in each batch row.

    The other layouts override what differs. Code is for kernels, `HostCode` for launches.
    """

    has_sequences = False
    """True if tokens of several sequences follow each other: a program finds its own, from `q_start` and `kv_start` on,
    in the table `block_seqs`."""

    gives_positions = False
    """True if a call may pass a position for each token, so that `q_idx` and `kv_idx` are not rows and columns."""

    # --------------------------------------------------------------------------------------------------- in kernels

    axes = "bhs"
    """The axes of a `[B, H, S, D]` tensor but the last, a letter each, as in the names of their strides."""

    keys = "kv_idx"
    """The vector of keys by their place in memory, which is also their position if a call gives no positions."""

    ragged: Code = Name("RAGGED")
    """Whether the last block may be cut: the call knows."""

    def head_offset(self, x: str, head: str, axis: str) -> Code:  # noqa: ARG002  (packed layouts read `axis`)
        """The offset of the first token of a head in a tensor `x`; `axis`: q or kv, the tokens of `x`."""
        return Infix("+", product(Name("b"), Name(f"stride_{x}b")), product(Name(head), Name(f"stride_{x}h")))

    def aligned_head_offset(self, x: str, head: str, axis: str) -> Code:
        """The offset in an input whose rows are aligned: strides of batch and head count units of UNIT elements."""
        return product(self.head_offset(x, head, axis), Name("UNIT"))

    def row_offset(self, axis: str) -> Code:
        """The offset of a head's first row in vectors such as lse, delta and sums of rows: `[B, Hq, S]`."""
        return product(_HEAD_NUMBER, Name(f"{axis}_len"))

    @property
    def lse_offset(self) -> Code:
        """The offset of a query head's first row in lse."""
        return self.row_offset("q")

    @property
    def published_lse_offset(self) -> Code:
        """The `lse_offset` in a kernel whose programs read it from their work descriptors."""
        return self.lse_offset

    @property
    def partial_sum_index(self) -> Code:
        """The index of a sum that a program of query rows leaves for the host to add up."""
        return total([product(_HEAD_NUMBER, Name("num_blocks")), _QUERY_BLOCK])

    # ----------------------------------------------------------------------- in kernels that make tables of blocks

    part = "part_idx"
    """The vector of a program's parts."""

    list_room = "num_others"
    """The room of each block's list."""

    def num_parts(self, axis: str) -> Code:
        """How many parts an axis has."""
        return builtin("cdiv", Name(f"{axis}_len"), Name("PART"))

    def first_part(self, axis: str) -> Code:
        """The index of the first of a head's parts."""
        return product(Name("head"), Name(f"num_{axis}"))

    # ------------------------------------------------------------------------------------------------- in launches

    reference = "reference"
    """The plain reference."""

    g_axis = 1
    """The axis of tokens of the log-decay's argument g."""

    def strides(self, *tensors: str) -> HostCode:
        """The strides of tensors along `axes`."""
        return host("*strides({})", listed(tensors))

    def unit_strides(self, *tensors: str) -> HostCode:
        """The strides of aligned inputs along `axes`, those of batch and head in units of 16 bytes."""
        return host("*unit_strides({})", listed(tensors))

    def query_programs(self, tile: str) -> HostCode:
        """How many programs serve the blocks of query rows of all heads."""
        return host("cdiv({}, {}.block_m) * {} * {}", "q_len", tile, "num_heads", "batch")

    def key_programs(self, tile: str) -> HostCode:
        """How many programs serve the blocks of keys of all key heads."""
        return host("cdiv({}, {}.block_n) * {} * {}", "kv_len", tile, "num_kv_heads", "batch")

    list_axes: HostCode = listed(["list_batch", "list_heads"])
    """The leading axes of tables: how many batch rows and heads have their own."""

    @property
    def list_programs(self) -> HostCode:
        """How many programs make a table: one for each of its rows."""
        return host("{} * {} * {}", "list_batch", "list_heads", "own_blocks")

    list_heads: HostCode = host("{} * {}", "list_batch", "list_heads")
    """How many batch rows and heads together have tables of their own."""

    own_blocks: HostCode = listed(["own_blocks"])
    """How many blocks a table has for each of them."""


_HEAD_NUMBER: Code = Infix("+", product(Name("b"), Name("num_heads")), Name("h"))
"""The number of a head among all of the call."""

_QUERY_BLOCK: Code = Infix("//", Name("start_m"), Name("BLOCK_M"))


class SegmentedLayout(TokenLayout):
    """A dense call with segment ids, and perhaps positions of its tokens."""

    gives_positions = True
    keys = "cols"


class PackedLayout(TokenLayout):
    """A packed call: tensors `[total, H, D]`, whose sequences follow each other and may end anywhere."""

    has_sequences = True
    axes = "hs"
    ragged: Code = Literal(True)

    def head_offset(self, x: str, head: str, axis: str) -> Code:
        first = product(Name(f"{axis}_start"), Name(f"stride_{x}s"))
        return Infix("+", first, product(Name(head), Name(f"stride_{x}h")))

    def aligned_head_offset(self, x: str, head: str, axis: str) -> Code:
        first = product(Name(f"{axis}_start"), Name(f"stride_{x}s"))
        return Infix("+", first, product(Name(head), Name(f"stride_{x}h"), Name("UNIT")))

    def row_offset(self, axis: str) -> Code:
        """As in a dense call, in vectors `[Hq, total]`."""
        return total([product(Name("h"), Name(f"{axis}_total")), Name(f"{axis}_start")])

    @property
    def published_lse_offset(self) -> Code:
        """The rows of runs of a segmented call lie elsewhere in lse than in q."""
        return total([product(Name("h"), Name("q_total")), Name("lse_start")])

    @property
    def partial_sum_index(self) -> Code:
        entries = Infix("//", builtin("num_programs", Literal(0)), Name("num_heads"))
        return total([product(Name("h"), entries), Name("first_entry"), _QUERY_BLOCK])

    part = "slots"
    """A program's slots for parts. Two sequences share no slot, so some slots hold no part."""

    list_room = "num_others_most"
    """Blocks of sequences have lists of different length: each has the room of the longest."""

    def num_parts(self, axis: str) -> Code:
        return Name(f"{axis}_parts")

    def first_part(self, axis: str) -> Code:
        before = Infix("//", Name(f"{axis}_start"), Name("PART"))
        return total([product(Name("head"), Name(f"{axis}_parts")), before, Name("b")])

    reference = "packed_reference"
    g_axis = 0

    def strides(self, *tensors: str) -> HostCode:
        return host("*packed_strides({})", listed(tensors))

    def unit_strides(self, *tensors: str) -> HostCode:
        return host("*packed_unit_strides({})", listed(tensors))

    def query_programs(self, tile: str) -> HostCode:  # noqa: ARG002  (dense layouts read `tile`)
        return host("{}.shape[0] * {}", "block_seqs", "num_heads")

    def key_programs(self, tile: str) -> HostCode:  # noqa: ARG002  (dense layouts read `tile`)
        return host("{}.shape[0] * {}", "key_block_seqs", "num_kv_heads")

    list_axes = listed(["list_heads"])
    list_heads = listed(["list_heads"])
    own_blocks = host("{}.shape[0]", "block_seqs")

    @property
    def list_programs(self) -> HostCode:
        return host("{} * {}.shape[0]", "list_heads", "block_seqs")


_LAYOUTS: dict[Mode, TokenLayout] = {
    Mode.DENSE: TokenLayout(),
    Mode.PACKED: PackedLayout(),
    Mode.SEGMENTED: SegmentedLayout(),
}


def token_layout(mode: Mode) -> TokenLayout:
    """The layout of tokens in a mode of calls."""
    return _LAYOUTS[mode]


@dataclass(frozen=True, kw_only=True)
class InMode:
    """The base of plans that belong to one mode of calls; templates read the mode from it."""

    mode: Mode

    @property
    def layout(self) -> TokenLayout:
        """How the tokens of a call lie."""
        return token_layout(self.mode)

    @property
    def packed(self) -> bool:
        return self.mode is Mode.PACKED

    @property
    def segmented(self) -> bool:
        return self.mode is Mode.SEGMENTED
